"""`least_loaded`: parts in proportion to the measured service rate, less for those who have a queue already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet_placement.core.policies.port import Taker, normalised

#: Below it, all together, reports say nothing: figures divided by so little would not add up.
_MIN_FRESHNESS_RATIO = 1e-3


@dataclass(frozen=True, slots=True)
class LeastLoadedPolicy:
    """Rate = slots / service_s, discounted by the queue and by missing reports.

    Attributes:
        probe_ratio: part of all work divided equally, so that a worker that was slow is measured again.
        queue_per_slot: waiting items per slot at which a taker's part is halved.
    """

    probe_ratio: float = 0.05
    queue_per_slot: float = 8.0

    @property
    def name(self) -> str:
        return "least_loaded"

    def weights(self, takers: Sequence[Taker]) -> Mapping[str, float]:
        live = [taker for taker in takers if taker.is_live]
        fresh = normalised({taker.name: taker.freshness_ratio for taker in live})
        if live and sum(taker.freshness_ratio for taker in live) < _MIN_FRESHNESS_RATIO:
            # Nobody's reports arrive: that says more about the reports than about the workers.
            live = [Taker(name=taker.name, slots=taker.slots) for taker in live]
            fresh = normalised({taker.name: 1.0 for taker in live})
        unmeasured_rate = _mean_slot_rate(live)
        earned = normalised({taker.name: self._earned(taker, unmeasured_rate) for taker in live})
        parts = {name: (1.0 - self.probe_ratio) * earned[name] + self.probe_ratio * fresh[name] for name in earned}
        return {taker.name: parts.get(taker.name, 0.0) for taker in takers}

    def _earned(self, taker: Taker, unmeasured_rate: float) -> float:
        slots = max(1, taker.slots)
        slot_rate = 1.0 / taker.service_s if taker.service_s > 0.0 else unmeasured_rate
        discount = 1.0 + max(0, taker.queued) / (slots * self.queue_per_slot)
        return slots * slot_rate * taker.freshness_ratio / discount


def _mean_slot_rate(takers: Sequence[Taker]) -> float:
    """Items per second of a slot nobody measured: the mean of those measured, 1 when none is."""
    rates = [1.0 / taker.service_s for taker in takers if taker.service_s > 0.0]
    return sum(rates) / len(rates) if rates else 1.0
