"""The encoder's side of every model family: what an adapter owes, and the table of them.

A family is chosen by `model_type` of config.json; preprocess (`core/families.py`) and decode (`engine/families.py`)
have the same table for their part. Adapters import torch: they are looked up when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fleet_contracts.base import Modality
from fleet_vision.core.numbers import Normalisation
from fleet_vision.engine.port import EncoderImage


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What an adapter is built from.

    Attributes:
        tower_args: handed to the tower's `from_config`, like `attn_implementation`.
    """

    folder: Path
    config: Mapping[str, Any]
    normalisation: Normalisation
    device: torch.device
    dtype: torch.dtype
    tower_args: Mapping[str, Any] = field(default_factory=dict)


class TowerAdapter(Protocol):
    """Tower and projector of one checkpoint, without its language model."""

    @property
    def media(self) -> tuple[Modality, ...]:
        """Kinds it encodes."""

    @property
    def hidden_size(self) -> int:
        """Width of an embedding: the decoder's."""

    @property
    def num_tokens(self) -> int:
        """Embeddings of every image; 0 where that depends on its size."""

    @property
    def packing_unit(self) -> int:
        """Patches that a packed pass grows by at least; 0: only images of one shape share a pass."""

    def encode(self, images: Sequence[EncoderImage], num_padding: int) -> list[npt.NDArray[np.float32]]:
        """One pass: float32 [num_tokens, hidden_size] of each image, in order.

        Args:
            num_padding: blank patches to compute besides, whole packing units.
        """


def _llava(checkpoint: Checkpoint) -> TowerAdapter:
    from fleet_vision.engine.llava import LlavaTower

    return LlavaTower(checkpoint)


def _qwen_vl(checkpoint: Checkpoint) -> TowerAdapter:
    from fleet_vision.engine.qwen_vl import QwenTower

    return QwenTower(checkpoint)


def _internvl(checkpoint: Checkpoint) -> TowerAdapter:
    from fleet_vision.engine.internvl import InternVlTower

    return InternVlTower(checkpoint)


def _qwen_audio(checkpoint: Checkpoint) -> TowerAdapter:
    from fleet_vision.engine.qwen_audio import QwenAudioTower

    return QwenAudioTower(checkpoint)


#: `model_type` -> adapter. ValueError for a checkpoint that it does not follow.
FAMILIES: Mapping[str, Callable[[Checkpoint], TowerAdapter]] = {
    "llava": _llava,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "internvl": _internvl,
    "qwen2_audio": _qwen_audio,
}


def build_tower(checkpoint: Checkpoint) -> TowerAdapter:
    """The adapter of a model, weights loaded. ValueError for a family that is not in the table."""
    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(
            f"multimodal models of type {model_type!r} are not supported (supported: {', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type](checkpoint)


def to_numpy(features: torch.Tensor) -> npt.NDArray[np.float32]:
    """float32 on the CPU, contiguous."""
    made: npt.NDArray[np.float32] = features.to("cpu", torch.float32).contiguous().numpy()
    return made
