"""The vision tower of a checkpoint, of whatever family, through transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fleet_common.checkpoints import checkpoint_revision, image_processor_config, locate_checkpoint, read_json
from fleet_common.errors import EngineError, EngineOutOfMemoryError
from fleet_vision.core.numbers import read_normalisation
from fleet_vision.engine.families import Checkpoint, TowerAdapter, build_tower
from fleet_vision.engine.port import EncoderFacts, EncoderImage

_PATTERNS = ("*.json", "*.safetensors")
#: What torch's CPU allocator says; it raises a plain RuntimeError.
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"


class CheckpointEncoder:
    """Tower and projector as transformers has them; no language model."""

    def __init__(self, name_or_path: str, engine_args: Mapping[str, Any], *, num_threads: int) -> None:
        """
        Args:
            name_or_path: model folder or Hugging Face id.
            engine_args: `device` ("cpu"), `dtype` of the computation ("float32"); the rest goes to the tower's
                `from_config`, like `attn_implementation`.
            num_threads: compute threads of torch in this process.
        """
        more = dict(engine_args)
        self._device = torch.device(more.pop("device", "cpu"))
        self._dtype = getattr(torch, more.pop("dtype", "float32"))
        self._tower_args = more
        self._name_or_path = name_or_path
        self._num_threads = num_threads
        self._tower: TowerAdapter | None = None

    def load(self) -> EncoderFacts:
        torch.set_num_threads(self._num_threads)
        folder = locate_checkpoint(self._name_or_path, _PATTERNS)
        tower = build_tower(
            Checkpoint(
                folder=folder,
                config=read_json(folder, "config.json"),
                normalisation=read_normalisation(image_processor_config(folder)),
                device=self._device,
                dtype=self._dtype,
                tower_args=self._tower_args,
            )
        )
        self._tower = tower
        return EncoderFacts(
            revision=checkpoint_revision(folder),
            num_tokens=tower.num_tokens,
            hidden_size=tower.hidden_size,
            packing_unit=tower.packing_unit,
            media=tower.media,
        )

    def encode(self, images: Sequence[EncoderImage], num_padding: int = 0) -> list[npt.NDArray[np.float32]]:
        if self._tower is None:
            raise EngineError("the model is not loaded")
        try:
            with torch.inference_mode():
                return self._tower.encode(images, num_padding)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise EngineOutOfMemoryError(f"{len(images)} images do not fit") from error
        except RuntimeError as error:
            if _CPU_OUT_OF_MEMORY in str(error):
                raise EngineOutOfMemoryError(f"{len(images)} images do not fit") from error
            raise
