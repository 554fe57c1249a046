"""LLaVA: every picture becomes one square of the tower's size, and as many tokens as any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_preprocess.core.images import RgbArray
from fleet_preprocess.core.prepared import Prepared
from fleet_preprocess.core.resize import ResizeSpec, encoder_pixels, resize_spec

#: Leading tokens (class token) of each vision tower that are no patches.
_NUM_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


@dataclass(frozen=True, slots=True)
class FixedResolution:
    """A budget of pixels only makes a picture coarser here: it is scaled back up to the tower's size."""

    resize: ResizeSpec
    num_tokens: int
    grid_side: int
    tokens_around: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> FixedResolution:
        """From config.json and the image processor's settings; ValueError for a tower or size it does not know."""
        vision = config["vision_config"]
        tower = str(vision.get("model_type"))
        if tower not in _NUM_CLASS_TOKENS:
            raise ValueError(f"vision tower {tower!r} is not supported (supported: {', '.join(_NUM_CLASS_TOKENS)})")
        spec = resize_spec(processor)
        side_px = int(vision["image_size"])
        made_px = (spec.crop_height or spec.height, spec.crop_width or spec.width)
        if made_px != (side_px, side_px):
            raise ValueError(f"the image processor makes {made_px} pixels, the vision tower takes {side_px} squared")
        drops_first = config.get("vision_feature_select_strategy", "default") == "default"
        grid_side = side_px // int(vision["patch_size"])
        num_tokens = grid_side * grid_side + _NUM_CLASS_TOKENS[tower] - int(drops_first)
        return cls(resize=spec, num_tokens=num_tokens, grid_side=grid_side)

    @property
    def min_tokens(self) -> int:
        return self.num_tokens

    def identity(self) -> Mapping[str, Any]:
        return self.resize.identity()

    def prepare(self, rgb: RgbArray, max_pixels: int) -> Prepared:
        pixels = encoder_pixels(rgb, self.resize, max_pixels=max_pixels)
        return Prepared(pixels, self.num_tokens, (1, self.grid_side, self.grid_side))

    def prepare_frames(self, frames: RgbArray, max_pixels: int) -> Prepared:
        """Every frame as a picture of its own, one after the other."""
        pixels = np.stack([self.prepare(frame, max_pixels).pixels for frame in frames])
        return Prepared(pixels, self.num_tokens * len(pixels), (len(pixels), self.grid_side, self.grid_side))
