"""What a placement policy is: a pure function from measured load to parts of the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Taker:
    """Somebody who takes work: a worker within its pool, or a pool within its route.

    Attributes:
        name: worker id or pool name.
        slots: items it runs at once, > 0 while live.
        service_s: measured seconds per item in one slot, smoothed; 0 = not measured yet.
        queued: items waiting at it and not started.
        freshness_ratio: 1 while its reports arrive, falling to 0 when they stay away.
        is_live: False for the dead, draining and paused: they get nothing.
    """

    name: str
    slots: int
    service_s: float = 0.0
    queued: int = 0
    freshness_ratio: float = 1.0
    is_live: bool = True


class Policy(Protocol):
    """Divides work. Implementations keep no state and mean the same for workers and for pools."""

    @property
    def name(self) -> str: ...

    def weights(self, takers: Sequence[Taker]) -> Mapping[str, float]:
        """Part of new work per taker, by name.

        Non-negative, one entry per taker, 0 for those that are not live; the sum is 1, or 0 when nobody is live.
        A longer `service_s` of one taker, all else equal, never raises its part.
        """


def normalised(raw: Mapping[str, float]) -> dict[str, float]:
    """Scale non-negative figures to a sum of 1; all zero stays all zero."""
    total = sum(raw.values())
    if total <= 0.0:
        return dict.fromkeys(raw, 0.0)
    return {name: value / total for name, value in raw.items()}
