"""One measured figure, as it goes into build/bench.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and what it stands beside.

    Attributes:
        reference: the other measurement of the same run, in the same unit; None when there is nothing to compare.
        ratio: value / reference unless the part says otherwise.
        note: what was measured, for people.
    """

    name: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    note: str = ""

    def line(self) -> str:
        """One line for the terminal."""
        beside = "" if self.reference is None else f"  beside {self.reference:.4g} {self.unit}"
        ratio = "" if self.ratio is None else f"  ratio {self.ratio:.3f}"
        return f"{self.name:32} {self.value:10.4g} {self.unit}{beside}{ratio}  {self.note}".rstrip()
