"""Qwen2-Audio: windows of 30 seconds in a batch; what lies behind the end of a recording is masked, and dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2AudioConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder, Qwen2AudioMultiModalProjector

from fleet_contracts.base import Modality
from fleet_vision.engine.families import Checkpoint, to_numpy
from fleet_vision.engine.port import EncoderImage
from fleet_vision.engine.weights import load_part


class QwenAudioTower:
    """Every window has one size, whatever was said in it. Implements `TowerAdapter`."""

    packing_unit = 0
    num_tokens = 0
    media = (Modality.AUDIO,)

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = Qwen2AudioConfig.from_pretrained(checkpoint.folder)
        tower = Qwen2AudioEncoder._from_config(config.audio_config, **checkpoint.tower_args)
        projector = Qwen2AudioMultiModalProjector(config)
        load_part(tower, checkpoint.folder, "audio_tower")
        load_part(projector, checkpoint.folder, "multi_modal_projector")
        self._checkpoint = checkpoint
        self._tower: Any = tower.to(checkpoint.device, checkpoint.dtype).eval()
        self._projector = projector.to(checkpoint.device, checkpoint.dtype).eval()
        self.hidden_size = int(config.text_config.hidden_size)

    def encode(self, images: Sequence[EncoderImage], num_padding: int) -> list[npt.NDArray[np.float32]]:
        features = torch.from_numpy(np.stack([image.pixels for image in images]))
        values = features.to(self._checkpoint.device, self._checkpoint.dtype)
        num_positions = values.shape[-1] // 2
        ends = [image.num_patches for image in images]
        is_behind = torch.arange(num_positions)[None] >= torch.tensor(ends)[:, None]
        mask = torch.zeros((len(images), 1, num_positions, num_positions), dtype=values.dtype)
        mask.masked_fill_(is_behind[:, None, None, :], float("-inf"))
        states = self._tower(values, attention_mask=mask.to(values.device)).last_hidden_state
        embeddings = to_numpy(self._projector(states))
        return [one[: image.num_tokens].copy() for one, image in zip(embeddings, images, strict=True)]
