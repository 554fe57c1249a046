"""InternVL: tiles of all images in one batch, then pixel shuffle and projector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from fleet_contracts.base import Modality
from fleet_vision.core.numbers import normalise
from fleet_vision.engine.families import Checkpoint, to_numpy
from fleet_vision.engine.port import EncoderImage
from fleet_vision.engine.weights import load_part


class InternVlTower:
    """Every tile has one size, so images of any number of tiles share a pass. Implements `TowerAdapter`."""

    num_tokens = 0
    media = (Modality.IMAGE, Modality.VIDEO)

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = InternVLConfig.from_pretrained(checkpoint.folder)
        if config.vision_feature_layer != -1 or config.vision_feature_select_strategy != "default":
            raise ValueError("InternVL with another feature layer or selection than its own is not supported")
        tower = AutoModel.from_config(config.vision_config, **checkpoint.tower_args)
        projector = InternVLMultiModalProjector(config)
        load_part(tower, checkpoint.folder, "vision_tower")
        load_part(projector, checkpoint.folder, "multi_modal_projector")
        self._checkpoint = checkpoint
        self._tower: Any = tower.to(checkpoint.device, checkpoint.dtype).eval()
        self._projector = projector.to(checkpoint.device, checkpoint.dtype).eval()
        grid = config.vision_config.image_size[0] // config.vision_config.patch_size[0]
        self.packing_unit = grid * grid
        self._shrink = float(config.downsample_ratio)
        self.hidden_size = int(config.text_config.hidden_size)

    def encode(self, images: Sequence[EncoderImage], num_padding: int) -> list[npt.NDArray[np.float32]]:
        blank = np.zeros((num_padding // self.packing_unit, *images[0].pixels.shape[1:]), images[0].pixels.dtype)
        tiles = np.concatenate([*(image.pixels for image in images), blank])
        values = torch.from_numpy(normalise(tiles, self._checkpoint.normalisation))
        states = self._tower(values.to(self._checkpoint.device, self._checkpoint.dtype)).last_hidden_state[:, 1:]
        embeddings = to_numpy(self._projector(_shuffled(states, self._shrink)))
        pieces = np.split(embeddings, np.cumsum([len(image.pixels) for image in images]))
        return [piece.reshape(-1, self.hidden_size).copy() for piece in pieces[: len(images)]]


def _shuffled(states: torch.Tensor, shrink: float) -> torch.Tensor:
    """Neighbouring patches into the channels: [tiles, n, c] -> [tiles, n * shrink^2, c / shrink^2]."""
    num_tiles, num_patches, channels = states.shape
    side = int(num_patches**0.5)
    small = int(side * shrink)
    wide = states.view(num_tiles, side, small, int(channels / shrink)).permute(0, 2, 1, 3).contiguous()
    shuffled = wide.view(num_tiles, small, small, int(channels / (shrink * shrink))).permute(0, 2, 1, 3)
    return shuffled.reshape(num_tiles, small * small, -1)
