"""Pictures and videos in a chat: files of strangers into what the encoder takes, and what the timeline says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fleet_common.tensors.port import Array
from fleet_contracts.preprocess import MediaItem
from fleet_preprocess.core.body import ImageSource, VideoSource
from fleet_preprocess.core.families import ImageFamily
from fleet_preprocess.core.hashing import content_hash, pixel_digest
from fleet_preprocess.core.images import RgbArray, decode_image
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.core.prepared import Prepared
from fleet_preprocess.core.video import decode_video


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One picture or video ready for the encoder: uint8 [..., height, width, 3], and what the timeline says of it."""

    pixels: RgbArray
    item: MediaItem
    content_hash: str

    @property
    def array(self) -> Array:
        """As the encoder takes it: channels first."""
        return np.ascontiguousarray(np.moveaxis(self.pixels, -1, -3))


def prepare_image(
    data: bytes, source: ImageSource, family: ImageFamily, limits: MediaLimits, budget: int, revision: str
) -> PreparedImage:
    """Decode a picture and make it the model's size. Raises InvalidInputError as `decode_image`."""
    rgb = decode_image(data, limits, param=source.param)
    made = family.prepare(rgb, budget)
    *tiles, height, width, _ = made.pixels.shape
    item = MediaItem(
        part=source.param,
        kind="image",
        width=width,
        height=height * math.prod(tiles),
        mode="RGB",
        sha256=pixel_digest(made.pixels),
        num_tokens=made.num_tokens,
        source_width=rgb.shape[1],
        source_height=rgb.shape[0],
        grid=made.grid,
        max_pixels=budget,
    )
    return _prepared(rgb, made, item, family, revision)


def prepare_video(
    data: bytes, source: VideoSource, family: ImageFamily, limits: MediaLimits, budget: int, revision: str
) -> PreparedImage:
    """Decode a video's frames and make them the model's size. Raises InvalidInputError as `decode_video`."""
    video = decode_video(data, limits.video, param=source.param)
    made = family.prepare_frames(video.frames, budget)
    _, height, width, _ = made.pixels.shape
    item = MediaItem(
        part=source.param,
        kind="video",
        width=width,
        height=height,
        mode="RGB",
        sha256=pixel_digest(made.pixels),
        num_tokens=made.num_tokens,
        source_width=video.width,
        source_height=video.height,
        duration_s=video.duration_s,
        grid=made.grid,
        max_pixels=budget,
    )
    return _prepared(video.frames, made, item, family, revision)


def _prepared(source: RgbArray, made: Prepared, item: MediaItem, family: ImageFamily, revision: str) -> PreparedImage:
    settings = {**family.identity(), "max_pixels": item.max_pixels}
    return PreparedImage(made.pixels, item, content_hash(source, settings=settings, revision=revision))
