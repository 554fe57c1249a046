"""`static`: every slot counts the same, whatever is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_placement.core.policies.port import Taker, normalised


class StaticPolicy:
    """Parts in proportion to slots."""

    name = "static"

    def weights(self, takers: Sequence[Taker]) -> Mapping[str, float]:
        return normalised({taker.name: float(max(1, taker.slots)) if taker.is_live else 0.0 for taker in takers})
