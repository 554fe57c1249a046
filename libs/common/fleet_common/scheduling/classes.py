"""Weighted fair queues of one worker, one per priority class: work-conserving, ageing, never starving."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet_contracts.base import PriorityClass

T = TypeVar("T")

#: Share no class falls below while it has work, whatever the weights say.
MIN_SHARE_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A step that waits.

    Attributes:
        key: unique within the queues.
        enqueued_unix_s: when its message was published; age counts from here.
        arrived_s: monotonic second at which this worker got it.
        affinity: only entries of equal affinity share a batch.
        cost_bytes: input bytes it adds to a batch.
        is_solo: runs alone.
    """

    key: str
    priority_class: PriorityClass
    enqueued_unix_s: float
    arrived_s: float
    item: T
    affinity: tuple[object, ...] = ()
    cost_bytes: int = 0
    is_solo: bool = False


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """Shares and ageing.

    Attributes:
        weights: share per class; a class not named gets `min_share_ratio`.
        aging_s: an entry older than this goes before every younger one of any class.
        min_share_ratio: floor of every weight (the per-class minimum).
    """

    weights: Mapping[str, float]
    aging_s: float = 30.0
    min_share_ratio: float = MIN_SHARE_RATIO

    def weight(self, priority_class: PriorityClass) -> float:
        """Weight of a class, never below the floor."""
        return max(self.min_share_ratio, self.weights.get(priority_class.value, 0.0))

    def share_ratio(self, priority_class: PriorityClass) -> float:
        """Part of the service a class gets while every class has work."""
        return self.weight(priority_class) / sum(self.weight(other) for other in PriorityClass)


class ClassQueues(Generic[T]):
    """Entries of all classes, oldest first within a class.

    Start-time fair queueing: each class has a virtual time that advances by 1 / weight with every entry served; the
    class with the least goes next. A class that was empty starts at the time of the one served last, so idling earns
    no credit. An entry with k entries of its class before it is served within (k + 1) / share + 3 services.
    """

    def __init__(self, policy: ClassPolicy) -> None:
        self._policy = policy
        self._queues: dict[PriorityClass, list[tuple[float, int, Entry[T]]]] = {c: [] for c in PriorityClass}
        self._virtual: dict[PriorityClass, float] = dict.fromkeys(PriorityClass, 0.0)
        self._now_virtual = 0.0
        self._count = 0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Entry[T]]:
        for queue in self._queues.values():
            for _, _, entry in queue:
                yield entry

    def count(self, priority_class: PriorityClass) -> int:
        """Entries of one class."""
        return len(self._queues[priority_class])

    def push(self, entry: Entry[T]) -> None:
        """Add an entry; a redelivered one has its old publish time and so comes before younger ones."""
        queue = self._queues[entry.priority_class]
        if not queue:
            self._virtual[entry.priority_class] = max(self._virtual[entry.priority_class], self._now_virtual)
        self._count += 1
        insort(queue, (entry.enqueued_unix_s, self._count, entry))

    def remove(self, key: str) -> Entry[T] | None:
        """Take an entry out, None when it is not here."""
        for queue in self._queues.values():
            for position, (_, _, entry) in enumerate(queue):
                if entry.key == key:
                    del queue[position]
                    return entry
        return None

    def peek(self, now_unix_s: float, matches: Callable[[Entry[T]], bool] | None = None) -> Entry[T] | None:
        """What `pop` would return."""
        found = self._choose(now_unix_s, matches)
        return None if found is None else self._queues[found[0]][found[1]][2]

    def pop(self, now_unix_s: float, matches: Callable[[Entry[T]], bool] | None = None) -> Entry[T] | None:
        """Take the next entry among those that match; None when none does.

        Aged entries go first, oldest of all classes first; then the class with the least virtual time.
        """
        found = self._choose(now_unix_s, matches)
        if found is None:
            return None
        priority_class, position = found
        _, _, entry = self._queues[priority_class].pop(position)
        self._now_virtual = max(self._now_virtual, self._virtual[priority_class])
        self._virtual[priority_class] += 1.0 / self._policy.weight(priority_class)
        return entry

    def _choose(
        self, now_unix_s: float, matches: Callable[[Entry[T]], bool] | None
    ) -> tuple[PriorityClass, int] | None:
        heads: list[tuple[PriorityClass, int, Entry[T]]] = []
        for priority_class, queue in self._queues.items():
            for position, (_, _, entry) in enumerate(queue):
                if matches is None or matches(entry):
                    heads.append((priority_class, position, entry))
                    break
        if not heads:
            return None
        aged = [head for head in heads if now_unix_s - head[2].enqueued_unix_s > self._policy.aging_s]
        if aged:
            best = min(aged, key=lambda head: head[2].enqueued_unix_s)
        else:
            best = min(heads, key=lambda head: self._virtual[head[0]])
        return best[0], best[1]
