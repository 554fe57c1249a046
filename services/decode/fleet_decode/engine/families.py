"""The decode side of every multimodal family: how embeddings go into vLLM, and what vLLM is told at its start.

A family is chosen by `model_type` of config.json; preprocess (`core/families.py`) and vision (`engine/families.py`)
have the same table for their part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet_common.errors import EngineError
from fleet_decode.engine.port import ImageEmbeds

#: (kind, media, their tensors) -> what vLLM wants as `multi_modal_data[kind]`.
MediaData = Callable[[str, Sequence[ImageEmbeds], Sequence[Any]], Any]


def _one_tensor_each(kind: str, media: Sequence[ImageEmbeds], tensors: Sequence[Any]) -> Any:
    return list(tensors)


def _embeds_and_grids(kind: str, media: Sequence[ImageEmbeds], tensors: Sequence[Any]) -> Any:
    """Positions in time, height and width follow from the grids: vLLM computes them."""
    grids = [one.grid for one in media]
    if None in grids:
        raise EngineError(f"one {kind} came without its grid of patches")
    import torch

    return {f"{kind}_embeds": torch.cat(list(tensors)), f"{kind}_grid_thw": torch.tensor(grids)}


@dataclass(frozen=True, slots=True)
class DecodeFamily:
    """One family.

    Attributes:
        media: kinds that vLLM's model takes: their towers are kept out.
        media_data: how their embeddings are handed over.
        processor_kwargs: for vLLM's `mm_processor_kwargs`.
        has_videos: a video's embeddings are handed over as such, with times; elsewhere as a picture's.
    """

    media: tuple[str, ...] = ("image",)
    media_data: MediaData = _one_tensor_each
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    has_videos: bool = False

    def handed_as(self, kind: str) -> str:
        """As which kind vLLM gets a medium."""
        return "image" if kind == "video" and not self.has_videos else kind


# vLLM measures a made-up item of every kind at start. Without torchvision that takes the image processors' PIL form,
# which they would not choose by themselves beside the guard's stand-ins (`backend` would be clearer, but reaches video
# processors too, which have no such form).
_PIL = {"use_fast": False}
#: For a video that has the tower's size already, as the made-up one: nothing is left for torchvision to do.
VIDEO_AS_IT_IS = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), False)

#: `model_type` -> adapter.
FAMILIES: Mapping[str, DecodeFamily] = {
    "llava": DecodeFamily(processor_kwargs=_PIL),
    "qwen2_vl": DecodeFamily(("image", "video"), _embeds_and_grids, _PIL, has_videos=True),
    "qwen2_5_vl": DecodeFamily(("image", "video"), _embeds_and_grids, _PIL, has_videos=True),
    "internvl": DecodeFamily(("image", "video"), processor_kwargs={**_PIL, "videos_kwargs": VIDEO_AS_IT_IS}),
    "qwen2_audio": DecodeFamily(("audio",)),
}


def decode_family(config: Mapping[str, Any]) -> DecodeFamily | None:
    """The adapter of a model, None for one that takes text only.

    Raises:
        ValueError: it takes media and is not in the table.
    """
    model_type = str(config.get("model_type"))
    if "vision_config" not in config and "audio_config" not in config:
        return None
    if model_type not in FAMILIES:
        raise ValueError(
            f"multimodal models of type {model_type!r} are not supported (supported: {', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type]
