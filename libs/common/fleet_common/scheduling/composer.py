"""Compose the next batch of a worker from its class queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet_common.scheduling.classes import ClassQueues, Entry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What bounds a batch.

    Attributes:
        max_batch: entries.
        max_bytes: input bytes together; 0 = no bound. One entry always fits.
        linger_s: longest wait of an entry, from its arrival here, for a fuller batch.
    """

    max_batch: int
    max_bytes: int = 0
    linger_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Composed(Generic[T]):
    """Either a batch to run now, or how long to wait for a fuller one (None: nothing waits at all)."""

    batch: tuple[Entry[T], ...] = ()
    wait_s: float | None = None


def compose(queues: ClassQueues[T], limits: BatchLimits, *, now_s: float, now_unix_s: float) -> Composed[T]:
    """Take the fairest entry and fill its batch with entries of the same affinity, fairest first.

    Args:
        now_s: monotonic second, the clock of `Entry.arrived_s`.
        now_unix_s: wall-clock second, the clock of `Entry.enqueued_unix_s`.
    """
    seed = queues.peek(now_unix_s)
    if seed is None:
        return Composed()
    wait_s = seed.arrived_s + limits.linger_s - now_s
    if not seed.is_solo and wait_s > 0 and not _is_full(queues, limits, seed):
        return Composed(wait_s=wait_s)
    first = queues.pop(now_unix_s)
    if first is None:
        return Composed()
    batch = [first]
    size_bytes = first.cost_bytes
    while not first.is_solo and len(batch) < limits.max_batch:
        room_bytes = limits.max_bytes - size_bytes if limits.max_bytes else None
        entry = queues.pop(now_unix_s, lambda other, room=room_bytes: _joins(first, other, room))  # type: ignore[misc]
        if entry is None:
            break
        batch.append(entry)
        size_bytes += entry.cost_bytes
    return Composed(batch=tuple(batch))


def _joins(seed: Entry[T], other: Entry[T], room_bytes: int | None) -> bool:
    fits = room_bytes is None or other.cost_bytes <= room_bytes
    return fits and not other.is_solo and other.affinity == seed.affinity


def _is_full(queues: ClassQueues[T], limits: BatchLimits, seed: Entry[T]) -> bool:
    mates = [entry for entry in queues if entry.key != seed.key and _joins(seed, entry, None)]
    if 1 + len(mates) >= limits.max_batch:
        return True
    size_bytes = seed.cost_bytes + sum(mate.cost_bytes for mate in mates)
    return bool(limits.max_bytes) and size_bytes >= limits.max_bytes
