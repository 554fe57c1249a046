"""What vision needs of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fleet_contracts.base import Modality


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """Facts of a loaded encoder.

    Attributes:
        revision: identifies weights and image settings.
        num_tokens: embeddings per image at the model's resolution; 0 where they depend on an image's size.
        hidden_size: width of an embedding: the decoder's.
        packing_unit: patches that a packed pass grows by at least; 0: only images of one shape share a pass.
        media: kinds it encodes.
    """

    revision: str
    num_tokens: int
    hidden_size: int
    packing_unit: int = 0
    media: tuple[Modality, ...] = (Modality.IMAGE,)


@dataclass(frozen=True, slots=True)
class EncoderImage:
    """One image, video or recording to encode.

    Attributes:
        pixels: uint8 [3, height, width] or [tiles or frames, 3, height, width] before normalisation, or float32
            normalised; of a recording float32 [mel bins, frames]. Read-only, not kept.
        content_hash: identifies the content.
        num_tokens: embeddings the prompt has room for.
        num_patches: what the tower computes for it; 0: as many as tokens.
    """

    pixels: npt.NDArray[Any]
    content_hash: str
    num_tokens: int
    num_patches: int = 0


class VisionEncoder(Protocol):
    """Images into the decoder's embedding space. Methods block and are called from one thread only."""

    def load(self) -> EncoderFacts:
        """Load weights. Raises OSError or ValueError when they are missing or not understood."""

    def encode(self, images: Sequence[EncoderImage], num_padding: int = 0) -> list[npt.NDArray[np.float32]]:
        """Encode images in one pass: of one shape, or of any where the encoder packs.

        Args:
            num_padding: blank patches to compute besides, whole packing units.
        Returns:
            float32 [num_tokens, hidden_size] each, in order; the caller owns them.
        Raises:
            EngineOutOfMemoryError: the batch does not fit; a smaller one may.
        """
