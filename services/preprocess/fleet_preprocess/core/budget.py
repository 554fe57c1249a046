"""How many pixels of a picture the model gets to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PixelBudgets:
    """Budgets of one model; 0: none but the model's own.

    Attributes:
        max_pixels: of every picture, whatever a client asks for.
        low_detail_pixels: of pictures sent with `detail: low`, where a picture's tokens depend on its size.
    """

    max_pixels: int = 0
    low_detail_pixels: int = 512 * 512


def smallest_budget(budgets: Sequence[int]) -> int:
    """The strictest of several budgets, 0 for those that say nothing."""
    return min((budget for budget in budgets if budget), default=0)
