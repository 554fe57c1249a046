"""What a family adapter makes of one picture or video."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_preprocess.core.images import RgbArray


@dataclass(frozen=True, slots=True)
class Prepared:
    """One picture or video ready for the encoder, before normalisation.

    Attributes:
        pixels: uint8 [height, width, 3]; [tiles, height, width, 3] for families that cut pictures into tiles; of a
            video [frames, height, width, 3].
        num_tokens: embeddings the encoder will make of it.
        grid: steps in time (or tiles), rows and columns of the tower's patches.
    """

    pixels: RgbArray
    num_tokens: int
    grid: tuple[int, int, int]
