"""How pictures become pixels and tokens, by model family: what an adapter owes, and the table of them.

A family is chosen by `model_type` of config.json; vision (`engine/families.py`) and decode (`engine/families.py`) have
the same table for their part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fleet_preprocess.core.fixed_resolution import FixedResolution
from fleet_preprocess.core.images import RgbArray
from fleet_preprocess.core.internvl import InternVlTiles
from fleet_preprocess.core.prepared import Prepared
from fleet_preprocess.core.qwen_vl import QwenResolution


class ImageFamily(Protocol):
    """Pictures of one model. Pure; called from several threads at once."""

    @property
    def num_tokens(self) -> int:
        """Tokens of every picture; 0 where that depends on its size."""

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest picture: what a prompt needs at least, before anything is decoded."""

    @property
    def tokens_around(self) -> int:
        """Tokens that the decode engine puts around those of a picture."""

    def identity(self) -> Mapping[str, Any]:
        """Every setting, for content hashes."""

    def prepare(self, rgb: RgbArray, max_pixels: int) -> Prepared:
        """The arrays of the encoder for uint8 [height, width, 3]; `max_pixels` 0: no budget but the model's own."""

    def prepare_frames(self, frames: RgbArray, max_pixels: int) -> Prepared:
        """The same for a video, uint8 [frames, height, width, 3]: [frames, ...] again, maybe one more of them."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model folder says of its pictures: config.json, and the settings of the image processor."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]


#: `model_type` -> adapter. ValueError for a tower, processor or size rule that it does not follow.
FAMILIES: Mapping[str, Callable[[ModelFiles], ImageFamily]] = {
    "llava": lambda files: FixedResolution.read(files.config, files.processor),
    "qwen2_vl": lambda files: QwenResolution.read(files.config, files.processor),
    "qwen2_5_vl": lambda files: QwenResolution.read(files.config, files.processor),
    "internvl": lambda files: InternVlTiles.read(files.config, files.processor),
}


def image_family(files: ModelFiles) -> ImageFamily:
    """The adapter of a model. ValueError for a family that is not in the table."""
    model_type = str(files.config.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(
            f"vision-language models of type {model_type!r} are not supported (supported: {', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type](files)
