"""How many messages a worker asks the broker for, per class and lane."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleet_contracts.base import PriorityClass


@dataclass(frozen=True, slots=True)
class CreditPolicy:
    """What bounds the messages a worker holds.

    Attributes:
        slots: items it runs at once.
        look_ahead_ratio: messages held beyond the slots, as a multiple of the slots, for an even share.
        shares: part of the look-ahead per class.
    """

    slots: int
    look_ahead_ratio: float
    shares: Mapping[PriorityClass, float]

    def look_ahead(self, share_ratio: float, num_workers: int) -> int:
        """Messages beyond the slots: a worker with an even share of its pool gets `look_ahead_ratio` x slots."""
        return math.ceil(self.look_ahead_ratio * self.slots * share_ratio * num_workers)

    def class_limits(self, share_ratio: float, num_workers: int) -> dict[PriorityClass, int]:
        """Messages held per class, running ones included.

        Each class alone can fill the slots (work-conserving), none can take another's part (no starvation); together
        they are bounded by slots x 3 + look-ahead + 3.
        """
        total = self.slots + self.look_ahead(share_ratio, num_workers)
        return {c: max(self.slots, math.ceil(self.shares.get(c, 0.0) * total)) for c in PriorityClass}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Messages to ask for: from the lane of all, and from the worker's own."""

    any_lane: int
    own_lane: int


NOTHING_WANTED = Wanted(any_lane=0, own_lane=0)


def wanted(limits: Mapping[PriorityClass, int], held: Mapping[PriorityClass, int]) -> dict[PriorityClass, Wanted]:
    """Split the free room of each class between the two lanes; the own lane keeps one credit at least.

    Held never exceeds the limit of a class by more than one (the own lane's last credit).
    """
    result: dict[PriorityClass, Wanted] = {}
    for priority_class, limit in limits.items():
        free = limit - held.get(priority_class, 0)
        if free <= 0:
            result[priority_class] = NOTHING_WANTED
        else:
            result[priority_class] = Wanted(any_lane=math.ceil(free / 2), own_lane=max(1, free // 2))
    return result


def total(wants: Mapping[PriorityClass, Wanted]) -> int:
    """Messages that may still arrive."""
    return sum(want.any_lane + want.own_lane for want in wants.values())
