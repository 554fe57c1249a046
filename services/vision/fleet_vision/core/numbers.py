"""Number formats: pixels to what the tower was trained on, features to what the decoder takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """`(pixel * scale - mean) / std` per channel; the image processor's own numbers."""

    scale: float = 1 / 255
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD


def read_normalisation(config: Mapping[str, Any]) -> Normalisation:
    """From the image processor's settings, with transformers' defaults for what they leave out."""
    is_siglip = str(config.get("image_processor_type", "")).startswith("Siglip")
    mean = config.get("image_mean") or (_HALF if is_siglip else _CLIP_MEAN)
    std = config.get("image_std") or (_HALF if is_siglip else _CLIP_STD)
    if not config.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    scale = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0
    return Normalisation(scale=scale, mean=tuple(mean), std=tuple(std))


def normalise(pixels: npt.NDArray[Any], normalisation: Normalisation) -> npt.NDArray[np.float32]:
    """uint8 [num_images, 3, height, width] -> float32 of that shape; float32 pixels count as normalised already."""
    if pixels.dtype == np.float32:
        return pixels
    # In double precision first, as transformers does: the results are then equal bit by bit.
    scaled = (pixels.astype(np.float64) * normalisation.scale).astype(np.float32)
    mean = np.asarray(normalisation.mean, dtype=np.float32).reshape(3, 1, 1)
    std = np.asarray(normalisation.std, dtype=np.float32).reshape(3, 1, 1)
    return np.ascontiguousarray((scaled - mean) / std, dtype=np.float32)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 rounded to the nearest bfloat16 (ties to even), as uint16 bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding would turn some NaNs into infinities.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
