"""LLaVA: tower, feature layer, selection strategy and projector as transformers has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from fleet_contracts.base import Modality
from fleet_vision.core.numbers import normalise
from fleet_vision.engine.families import Checkpoint, to_numpy
from fleet_vision.engine.port import EncoderImage
from fleet_vision.engine.weights import load_part


class LlavaTower:
    """A plain batch of images of one size; frames of a video are images. Implements `TowerAdapter`."""

    packing_unit = 0
    media = (Modality.IMAGE, Modality.VIDEO)

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = LlavaConfig.from_pretrained(checkpoint.folder)
        tower = AutoModel.from_config(config.vision_config, **checkpoint.tower_args)
        projector = LlavaMultiModalProjector(config)
        load_part(tower, checkpoint.folder, "vision_tower")
        load_part(projector, checkpoint.folder, "multi_modal_projector")
        self._checkpoint = checkpoint
        self._tower: Any = tower.to(checkpoint.device, checkpoint.dtype).eval()
        self._projector = projector.to(checkpoint.device, checkpoint.dtype).eval()
        layer = config.vision_feature_layer
        self._layers = (layer,) if isinstance(layer, int) else tuple(layer)
        self._drops_first = config.vision_feature_select_strategy == "default"
        side_px = int(config.vision_config.image_size)
        with torch.inference_mode():
            probe = self._run(np.zeros((1, 3, side_px, side_px), dtype=np.float32))
        self.num_tokens, self.hidden_size = probe.shape[1], probe.shape[2]

    def encode(self, images: Sequence[EncoderImage], num_padding: int) -> list[npt.NDArray[np.float32]]:
        stacked = np.stack([image.pixels for image in images])
        frames = stacked.reshape(-1, *stacked.shape[-3:])
        features = self._run(normalise(frames, self._checkpoint.normalisation))
        return [np.ascontiguousarray(one) for one in features.reshape(len(images), -1, self.hidden_size)]

    def _run(self, pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """float32 [num_images, 3, height, width] -> float32 [num_images, num_tokens, hidden_size]."""
        values = torch.from_numpy(pixels).to(self._checkpoint.device, self._checkpoint.dtype)
        states = self._tower(values, output_hidden_states=True, return_dict=True).hidden_states
        chosen = [states[layer][:, 1:] if self._drops_first else states[layer] for layer in self._layers]
        return to_numpy(self._projector(torch.cat(chosen, dim=-1)))
