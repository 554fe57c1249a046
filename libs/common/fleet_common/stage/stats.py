"""What a worker reports once a second, accumulated without clock or I/O."""

from __future__ import annotations

#: Part of the newest value in the running means: about the last ten steps count.
_NEWEST_RATIO = 0.2


class WorkerStats:
    """Counters and running means; every time is an argument (monotonic seconds)."""

    def __init__(self, slots: int, now_s: float) -> None:
        self.in_flight = 0
        self.completed_total = 0
        self.failed_total = 0
        self.service_s = 0.0
        self.queue_wait_s = 0.0
        self.last_batch_size = 0
        self._slots = slots
        self._busy_s = 0.0
        self._area_item_s = 0.0
        self._changed_s = now_s
        self._window_s = now_s
        self._window_area_item_s = 0.0

    def started(self, num_items: int, now_s: float) -> None:
        """The engine took `num_items` more."""
        self._advance(now_s)
        self.in_flight += num_items
        self.last_batch_size = num_items

    def stopped(self, num_items: int, service_s: float, now_s: float) -> None:
        """The engine gave `num_items` back after `service_s`."""
        self._advance(now_s)
        self.in_flight -= num_items
        self.service_s = _mean(self.service_s, service_s)

    def waited(self, queue_wait_s: float) -> None:
        """An item started that long after it was published."""
        self.queue_wait_s = _mean(self.queue_wait_s, queue_wait_s)

    def busy_s_total(self, now_s: float) -> float:
        """Seconds in which the engine ran something."""
        self._advance(now_s)
        return self._busy_s

    def utilisation_ratio(self, now_s: float) -> float:
        """Mean share of the slots in use since the last call, 0-1."""
        self._advance(now_s)
        span_s = now_s - self._window_s
        area = self._area_item_s - self._window_area_item_s
        self._window_s = now_s
        self._window_area_item_s = self._area_item_s
        return min(1.0, area / (span_s * self._slots)) if span_s > 0 else 0.0

    def _advance(self, now_s: float) -> None:
        span_s = max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        self._area_item_s += span_s * self.in_flight
        if self.in_flight > 0:
            self._busy_s += span_s


def _mean(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEWEST_RATIO * (new - old)
