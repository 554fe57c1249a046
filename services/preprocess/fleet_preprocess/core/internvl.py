"""InternVL: a picture is cut into square tiles after its aspect ratio, with a thumbnail of the whole behind them.

Follows transformers' GotOcr2ImageProcessor (PIL backend) as InternVL's processor calls it, without normalisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from fleet_preprocess.core.images import RgbArray
from fleet_preprocess.core.prepared import Prepared


@dataclass(frozen=True, slots=True)
class InternVlTiles:
    """A pixel budget bounds the tiles, thumbnail included; one tile is the least.

    Attributes:
        side_px: side of a tile; `patch_px` of the tower's patches.
        tokens_per_tile: after the pixel shuffle.
        resample: Pillow's number of the filter (3 = bicubic).
    """

    side_px: int
    patch_px: int
    tokens_per_tile: int
    min_tiles: int = 1
    max_tiles: int = 12
    resample: int = 3

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> InternVlTiles:
        """From config.json and the image processor's settings; ValueError where their sizes differ."""
        vision = config["vision_config"]
        side_px, patch_px = _side(vision["image_size"]), _side(vision["patch_size"])
        size = processor.get("size") or {"height": side_px, "width": side_px}
        if (size.get("height"), size.get("width")) != (side_px, side_px):
            raise ValueError(f"the image processor makes {dict(size)} pixels, the vision tower takes {side_px} squared")
        grid_side = int(side_px // patch_px * float(config.get("downsample_ratio", 0.5)))
        return cls(
            side_px=side_px,
            patch_px=patch_px,
            tokens_per_tile=grid_side * grid_side,
            min_tiles=int(processor.get("min_patches", 1)),
            max_tiles=int(processor.get("max_patches", 12)),
            resample=int(processor.get("resample", 3)),
        )

    @property
    def num_tokens(self) -> int:
        return 0

    @property
    def min_tokens(self) -> int:
        return self.tokens_per_tile

    @property
    def tokens_around(self) -> int:
        """`<img>` and `</img>`."""
        return 2

    def identity(self) -> Mapping[str, Any]:
        return asdict(self)

    def prepare(self, rgb: RgbArray, max_pixels: int) -> Prepared:
        columns, rows = self._within(max_pixels).canvas(rgb.shape[0], rgb.shape[1])
        side, image = self.side_px, Image.fromarray(rgb)
        whole = _resized(image, columns * side, rows * side, self.resample)
        tiles = [
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(_resized(image, side, side, self.resample))
        pixels = np.ascontiguousarray(np.stack(tiles))
        patches = side // self.patch_px
        return Prepared(pixels, self.tokens_per_tile * len(tiles), (len(tiles), patches, patches))

    def prepare_frames(self, frames: RgbArray, max_pixels: int) -> Prepared:
        """One tile for every frame, whatever its shape, as InternVL has it for videos."""
        one_tile = replace(self, min_tiles=1, max_tiles=1)
        pixels = np.concatenate([one_tile.prepare(frame, 0).pixels for frame in frames])
        patches = self.side_px // self.patch_px
        return Prepared(pixels, self.tokens_per_tile * len(pixels), (len(pixels), patches, patches))

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """(columns, rows) of tiles nearest to a picture's aspect ratio; of equal ones the larger, if it is not blown up
        to more than twice its area."""
        arrangements = [
            (columns, rows)
            for columns in range(1, self.max_tiles + 1)
            for rows in range(1, self.max_tiles + 1)
            if self.min_tiles <= columns * rows <= self.max_tiles
        ]
        best, best_difference = (1, 1), float("inf")
        for columns, rows in sorted(arrangements, key=lambda pair: pair[0] * pair[1]):
            difference = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.side_px * self.side_px * columns * rows
            if difference < best_difference or (difference == best_difference and is_filled):
                best, best_difference = (columns, rows), difference
        return best

    def _within(self, max_pixels: int) -> InternVlTiles:
        if not max_pixels:
            return self
        fitting = max_pixels // (self.side_px * self.side_px)
        # Two tiles bring a thumbnail: three are the first step beyond one.
        most = min(self.max_tiles, fitting - 1 if fitting >= 3 else 1)
        return replace(self, max_tiles=most, min_tiles=min(self.min_tiles, most))


def _resized(image: Image.Image, width: int, height: int, resample: int) -> RgbArray:
    return np.asarray(image.resize((width, height), Image.Resampling(resample)), dtype=np.uint8)


def _side(size: Any) -> int:
    """A square's side, written as one number or two."""
    sides = {int(size)} if isinstance(size, int) else {int(side) for side in size}
    if len(sides) != 1:
        raise ValueError(f"tiles of {size} pixels are not square")
    return sides.pop()
