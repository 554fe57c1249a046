"""How recordings become features and tokens, by model family: what an adapter owes, and the table of them.

A family is chosen by `model_type` of config.json; vision (`engine/families.py`) and decode (`engine/families.py`) have
the same table for their part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fleet_preprocess.core.families import ModelFiles
from fleet_preprocess.core.log_mel import Features
from fleet_preprocess.core.qwen_audio import QwenAudio


class AudioFamily(Protocol):
    """Recordings of one model. Pure; called from several threads at once."""

    @property
    def rate_hz(self) -> int:
        """Samples per second the model hears."""

    @property
    def max_s(self) -> float:
        """Longest recording in seconds."""

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest recording: what a prompt needs at least, before anything is decoded."""

    def identity(self) -> Mapping[str, Any]:
        """Every setting, for content hashes."""

    def num_positions(self, num_samples: int) -> int:
        """Positions of the tower that so many samples fill."""

    def num_tokens(self, num_samples: int) -> int:
        """Embeddings the encoder makes of so many samples; 0: too few to be heard."""

    def features(self, samples: npt.NDArray[np.float32]) -> Features:
        """What the encoder takes for float32 [samples] at `rate_hz`."""


#: `model_type` -> adapter. ValueError for a tower or feature extractor that it does not follow.
AUDIO_FAMILIES: Mapping[str, Callable[[ModelFiles], AudioFamily]] = {
    "qwen2_audio": lambda files: QwenAudio.read(files.config, files.processor),
}


def audio_family(files: ModelFiles) -> AudioFamily:
    """The adapter of a model. ValueError for a family that is not in the table."""
    model_type = str(files.config.get("model_type"))
    if model_type not in AUDIO_FAMILIES:
        raise ValueError(
            f"models of type {model_type!r} that hear are not supported (supported: {', '.join(AUDIO_FAMILIES)})"
        )
    return AUDIO_FAMILIES[model_type](files)
