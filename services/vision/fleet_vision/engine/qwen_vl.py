"""Qwen2-VL and Qwen2.5-VL: one packed pass over images of any size, each seeing only itself (`cu_seqlens`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from fleet_contracts.base import Modality
from fleet_vision.core.numbers import normalise
from fleet_vision.core.patches import to_patches
from fleet_vision.engine.families import Checkpoint, to_numpy
from fleet_vision.engine.port import EncoderImage
from fleet_vision.engine.weights import load_part

#: Their towers have no auto class.
_TOWERS: Mapping[str, Any] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
}


class QwenTower:
    """The tower with its merger; 2.5's attention windows are the tower's own. Implements `TowerAdapter`."""

    num_tokens = 0
    media = (Modality.IMAGE, Modality.VIDEO)

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = AutoConfig.from_pretrained(checkpoint.folder)
        vision = config.vision_config
        tower = _TOWERS[config.model_type]._from_config(vision, **checkpoint.tower_args)
        load_part(tower, checkpoint.folder, "visual")
        self._checkpoint = checkpoint
        self._tower: Any = tower.to(checkpoint.device, checkpoint.dtype).eval()
        self._patch_px = int(vision.patch_size)
        self._merge = int(vision.spatial_merge_size)
        self.packing_unit = self._merge * self._merge
        self._time_patch = int(vision.temporal_patch_size)
        # Qwen2.5 names the width of its embeddings apart from the tower's own.
        self.hidden_size = int(getattr(vision, "out_hidden_size", None) or vision.hidden_size)

    def encode(self, images: Sequence[EncoderImage], num_padding: int) -> list[npt.NDArray[np.float32]]:
        patches, grids = [], []
        for image in images:
            frames = image.pixels.reshape(-1, *image.pixels.shape[-3:])
            values = normalise(frames, self._checkpoint.normalisation)
            made, grid = to_patches(values, self._patch_px, self._merge, self._time_patch)
            patches.append(made)
            grids.append(grid)
        if num_padding:
            # A blank image of its own: nobody attends to it, and its embeddings are dropped.
            patches.append(np.zeros((num_padding, patches[0].shape[1]), dtype=np.float32))
            grids.append((1, self._merge, num_padding // self._merge))
        values = torch.from_numpy(np.concatenate(patches)).to(self._checkpoint.device, self._checkpoint.dtype)
        grid_thw = torch.tensor(grids, dtype=torch.long, device=self._checkpoint.device)
        merged = to_numpy(self._tower(values, grid_thw=grid_thw).pooler_output)
        sizes = [t * rows * columns // self.packing_unit for t, rows, columns in grids]
        # Copies: a view would keep the whole pack alive in the feature cache.
        pieces = np.split(merged, np.cumsum(sizes)[:-1])
        return [piece.copy() for piece in pieces[: len(images)]]
