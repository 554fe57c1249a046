"""Qwen2-VL and Qwen2.5-VL: pictures and videos keep their shape, and their tokens follow from their size.

Follows transformers' Qwen2VLImageProcessor (PIL backend) up to, and without, normalisation and patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from fleet_preprocess.core.images import RgbArray
from fleet_preprocess.core.prepared import Prepared

_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
#: Of a frame, when nobody asks for less: what Qwen's own tools use.
_MAX_FRAME_PIXELS = 28 * 28 * 768


@dataclass(frozen=True, slots=True)
class QwenResolution:
    """Sides are multiples of `unit_px`, and their product lies between `min_pixels` and `max_pixels`.

    Attributes:
        patch_px: side of a patch of the tower.
        merge: patches per token and side.
        time_patch: frames per patch.
        resample: Pillow's number of the filter (3 = bicubic).
    """

    patch_px: int = 14
    merge: int = 2
    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _MAX_PIXELS
    time_patch: int = 2
    resample: int = 3

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> QwenResolution:
        """From the image processor's settings; ValueError where the tower wants other patches, or no resize."""
        size = processor.get("size") or {}
        made = cls(
            patch_px=int(processor.get("patch_size", 14)),
            merge=int(processor.get("merge_size", 2)),
            time_patch=int(processor.get("temporal_patch_size", 2)),
            min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS),
            max_pixels=int(processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS),
            resample=int(processor.get("resample", 3)),
        )
        vision = config["vision_config"]
        tower = tuple(
            int(vision.get(name, default))
            for name, default in (("patch_size", 14), ("spatial_merge_size", 2), ("temporal_patch_size", 2))
        )
        if tower != (made.patch_px, made.merge, made.time_patch):
            raise ValueError(f"the image processor and the vision tower disagree on patch and merge size: {tower}")
        if not processor.get("do_resize", True):
            raise ValueError("an image processor that does not resize is not supported")
        return made

    @property
    def unit_px(self) -> int:
        """Side of a token."""
        return self.patch_px * self.merge

    @property
    def num_tokens(self) -> int:
        return 0

    @property
    def min_tokens(self) -> int:
        return 1

    @property
    def tokens_around(self) -> int:
        return 0

    def identity(self) -> Mapping[str, Any]:
        return asdict(self)

    def prepare(self, rgb: RgbArray, max_pixels: int) -> Prepared:
        budgeted = self
        if max_pixels:
            most = min(self.max_pixels, max_pixels)
            budgeted = replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most))
        height, width = budgeted.target_size(rgb.shape[0], rgb.shape[1])
        image = Image.fromarray(rgb)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling(self.resample))
        rows, columns = height // self.patch_px, width // self.patch_px
        pixels = np.ascontiguousarray(np.asarray(image, dtype=np.uint8))
        return Prepared(pixels, rows * columns // (self.merge * self.merge), (1, rows, columns))

    def prepare_frames(self, frames: RgbArray, max_pixels: int) -> Prepared:
        """All frames of one size; the last is repeated until the patches in time are whole."""
        budget = min(max_pixels or _MAX_FRAME_PIXELS, _MAX_FRAME_PIXELS)
        made = [self.prepare(frame, budget) for frame in frames]
        made += made[-1:] * (-len(made) % self.time_patch)
        steps, rows, columns = len(made) // self.time_patch, *made[0].grid[1:]
        return Prepared(np.stack([one.pixels for one in made]), made[0].num_tokens * steps, (steps, rows, columns))

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after the resize; never less than one token a side."""
        unit = self.unit_px
        # round() as transformers has it: ties to even.
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = math.floor(height / shrink / unit), math.floor(width / shrink / unit)
        elif rows * columns * unit * unit < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return max(1, rows) * unit, max(1, columns) * unit
