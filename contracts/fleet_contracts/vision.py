"""Stage `vision_encode`: what an encoder sees or hears in, embeddings of the decoder's space out.

The stage has its name from its first kind of media; a model's recordings are encoded there too. Another stage would be
one that the former release cannot read in a routing table.
"""

from __future__ import annotations

from fleet_contracts.base import Contract
from fleet_contracts.preprocess import MediaItem


class VisionParams(Contract, frozen=True, kw_only=True, tag="vision_encode.v1"):
    """Which of the request's images this step encodes.

    Attributes:
        items: places of the images among the request's media (`pixels<i>` of the preprocess output), in order.
    """

    items: tuple[int, ...]


class AudioEncodeParams(Contract, frozen=True, kw_only=True, tag="audio_encode.v1"):
    """Which of the request's recordings this step encodes.

    Attributes:
        items: places of the recordings among the request's media (`audio<i>` of the preprocess output), in order.
    """

    items: tuple[int, ...]


class VideoEncodeParams(Contract, frozen=True, kw_only=True, tag="video_encode.v1"):
    """Which of the request's videos this step encodes.

    Attributes:
        items: places of the videos among the request's media (`pixels<i>` of the preprocess output), in order.
    """

    items: tuple[int, ...]


class VisionResult(Contract, frozen=True, kw_only=True, tag="vision_result.v1"):
    """Tensors of the step's output: `embeds<i>` for each item, float [num_tokens, hidden_size].

    Attributes:
        media: the items as encoded, `cache_hit` filled in.
    """

    media: tuple[MediaItem, ...] = ()
