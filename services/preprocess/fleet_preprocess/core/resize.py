"""From a decoded image to the array the encoder gets, by the model's own image processor settings.

Follows transformers' CLIP, SigLIP and LLaVA image processors (PIL backend) up to, and without, normalisation: the
encoder normalises, so that 8-bit pixels travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from fleet_preprocess.core.images import RgbArray

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "SiglipImageProcessor": {"size": {"height": 224, "width": 224}, "do_center_crop": False},
}


@dataclass(frozen=True, slots=True)
class ResizeSpec:
    """How images become arrays of the encoder.

    Attributes:
        shortest_edge: target of the shorter side in pixels; 0: use `height` and `width`.
        height, width: exact target when `shortest_edge` is 0; both 0: no resize.
        resample: Pillow's number of the filter (3 = bicubic).
        crop_height, crop_width: centre crop after the resize, black where the image is smaller; 0: none.
        pad_to_square: first pad to a square of the colour `pad_rgb` (LLaVA's `do_pad`).
    """

    shortest_edge: int = 0
    height: int = 0
    width: int = 0
    resample: int = 3
    crop_height: int = 0
    crop_width: int = 0
    pad_to_square: bool = False
    pad_rgb: tuple[int, int, int] = (0, 0, 0)

    def identity(self) -> dict[str, Any]:
        """Every setting, for content hashes."""
        return asdict(self)


def resize_spec(config: Mapping[str, Any]) -> ResizeSpec:
    """Read an image processor's settings.

    Raises:
        ValueError: a processor or size rule this code does not follow; better not to start than to see wrongly.
    """
    kind = str(config.get("image_processor_type", "CLIPImageProcessor")).removesuffix("Fast")
    if kind not in _DEFAULTS:
        raise ValueError(f"image processor {kind} is not supported (supported: {', '.join(_DEFAULTS)})")
    merged: dict[str, Any] = {"do_resize": True, "resample": 3, **_DEFAULTS[kind], **config}
    size = _edges(merged["size"] if merged["do_resize"] else {"height": 0, "width": 0})
    crop_height, crop_width = _crop(merged)
    mean = tuple(merged.get("image_mean") or _CLIP_MEAN)
    return ResizeSpec(
        **size,
        resample=int(merged["resample"]),
        crop_height=crop_height,
        crop_width=crop_width,
        pad_to_square=bool(merged.get("do_pad", False)) and kind == "LlavaImageProcessor",
        pad_rgb=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
    )


def encoder_pixels(rgb: RgbArray, spec: ResizeSpec, *, max_pixels: int = 0) -> RgbArray:
    """The array the encoder gets.

    Args:
        rgb: uint8 [height, width, 3].
        max_pixels: shrink a larger image to this budget first; 0: no budget but the model's own.
    Returns:
        uint8 [height, width, 3], before normalisation.
    """
    image = Image.fromarray(rgb)
    if max_pixels and image.width * image.height > max_pixels:
        image = _shrink(image, max_pixels)
    if spec.pad_to_square and image.width != image.height:
        image = _square(image, spec.pad_rgb)
    target = _target_size(image.size, spec)
    if target != image.size:
        image = image.resize(target, Image.Resampling(spec.resample))
    if spec.crop_height:
        image = _center_crop(image, spec.crop_width, spec.crop_height)
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8))


def _edges(size: Any) -> dict[str, int]:
    if isinstance(size, int):  # old files: CLIP's shorter side
        return {"shortest_edge": size}
    given = {key: int(value) for key, value in size.items() if value}
    if set(given) <= {"height", "width"}:
        return given
    if set(given) == {"shortest_edge"}:
        return given
    raise ValueError(f"image size rule {sorted(given)} is not supported")


def _crop(config: Mapping[str, Any]) -> tuple[int, int]:
    crop = config.get("crop_size")
    if not config.get("do_center_crop") or not crop:
        return 0, 0
    if isinstance(crop, int):
        return crop, crop
    return int(crop["height"]), int(crop["width"])


def _target_size(size: tuple[int, int], spec: ResizeSpec) -> tuple[int, int]:
    """(width, height) after the resize; the longer side is rounded down, as transformers does."""
    if not spec.shortest_edge:
        return (spec.width, spec.height) if spec.width and spec.height else size
    width, height = size
    longer = int(spec.shortest_edge * max(size) / min(size))
    return (spec.shortest_edge, longer) if width <= height else (longer, spec.shortest_edge)


def _shrink(image: Image.Image, max_pixels: int) -> Image.Image:
    scale = math.sqrt(max_pixels / (image.width * image.height))
    size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)


def _square(image: Image.Image, fill: tuple[int, int, int]) -> Image.Image:
    side = max(image.size)
    ground = Image.new("RGB", (side, side), fill)
    ground.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return ground


def _center_crop(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = _crop_start(image.width, width), _crop_start(image.height, height)
    # Pillow fills what lies outside the image with black, as transformers pads with zeros.
    return image.crop((left, top, left + width, top + height))


def _crop_start(length: int, target: int) -> int:
    """First pixel of a centred span; negative where the image is shorter (transformers rounds that padding up)."""
    return (length - target) // 2
