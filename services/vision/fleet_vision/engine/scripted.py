"""An encoder without weights: features follow from the content hash. For tests and load work, never the default."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet_common.errors import EngineError, EngineOutOfMemoryError
from fleet_contracts.base import Modality
from fleet_vision.engine.port import EncoderFacts, EncoderImage


class ScriptedEncoder:
    """Equal content gives equal features, other content gives others."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        """
        Args:
            engine_args: `hidden_size` (576), `image_tokens` (16), `cost_s` seconds per image (0), `fail_hashes` content
                hashes that raise EngineError, `packing_unit` (0: by shape), `media` (`["image", "video"]`),
                `max_images` a batch may hold before it is out of memory (0: any).
        """
        self._hidden_size = int(engine_args.get("hidden_size", 576))
        self._image_tokens = int(engine_args.get("image_tokens", 16))
        self._cost_s = float(engine_args.get("cost_s", 0.0))
        self._fail_hashes = frozenset(engine_args.get("fail_hashes", ()))
        self._packing_unit = int(engine_args.get("packing_unit", 0))
        self._media = tuple(Modality(kind) for kind in engine_args.get("media", ("image", "video")))
        self._max_images = int(engine_args.get("max_images", 0))

    def load(self) -> EncoderFacts:
        return EncoderFacts(
            revision="scripted-1",
            num_tokens=self._image_tokens,
            hidden_size=self._hidden_size,
            packing_unit=self._packing_unit,
            media=self._media,
        )

    def encode(self, images: Sequence[EncoderImage], num_padding: int = 0) -> list[npt.NDArray[np.float32]]:
        if self._max_images and len(images) > self._max_images:
            raise EngineOutOfMemoryError(f"{len(images)} images do not fit")
        if any(image.content_hash in self._fail_hashes for image in images):
            raise EngineError("scripted failure")
        if self._cost_s:
            time.sleep(self._cost_s * len(images))
        return [self._features(image) for image in images]

    def _features(self, image: EncoderImage) -> npt.NDArray[np.float32]:
        random = np.random.default_rng(list(image.content_hash.encode()))
        return random.standard_normal((image.num_tokens, self._hidden_size), dtype=np.float32)
