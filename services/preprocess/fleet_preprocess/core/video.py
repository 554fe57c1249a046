"""Video files of strangers into a few frames, evenly spread in time; times and numbers are those of the data.

One pass, in order: no seeking, and no header is believed, so files that claim more frames than they hold, or no
duration at all, are read like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import av
import numpy as np

from fleet_common.errors import InvalidInputError
from fleet_preprocess.core.containers import UNREADABLE, decoded_frames, open_container
from fleet_preprocess.core.images import RgbArray
from fleet_preprocess.core.limits import VideoLimits

INVALID = "invalid_video"
TOO_LONG = "video_too_long"
TOO_LARGE = "video_too_large"
BAD_ASPECT = "video_bad_aspect"
NO_STREAM = "no_video_stream"

#: Seconds from one kept frame to the next, as long as not too many are kept.
_STEP_S = 0.5
#: Frames of more pixels are scaled down at once: no model sees more of one.
_KEPT_PIXELS = 1 << 20
#: Of frames without a time of their own in files that name no rate.
_DEFAULT_RATE_HZ = 25.0


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """The frames that are kept.

    Attributes:
        frames: uint8 [frames, height, width, 3], upright, scaled to about a megapixel at most.
        times_s: of each, from the first one on.
        duration_s: from the first frame to the end of the last, kept or not.
        width, height: of the first frame as decoded, upright.
    """

    frames: RgbArray
    times_s: tuple[float, ...]
    duration_s: float
    width: int
    height: int


def decode_video(data: bytes, limits: VideoLimits, *, param: str) -> DecodedVideo:
    """Decode the first video track of a file and keep frames evenly spread in time.

    The first frame of every half second is kept; when these are more than `limits.max_frames`, of every second, and so
    on: between half of that number and all of it, and memory follows the limit, not the file.

    Raises:
        InvalidInputError: `invalid_video`, `no_video_stream`, `video_too_long`, `video_too_large`, `video_bad_aspect`.
    """
    if not data:
        raise InvalidInputError("The video is empty.", param=param, code=INVALID)
    if len(data) > limits.max_bytes:
        raise InvalidInputError(
            f"The video has {len(data)} bytes, {limits.max_bytes} are taken.", param=param, code=TOO_LARGE
        )
    try:
        return _kept(_timed(data, limits, param), limits.max_frames)
    except UNREADABLE as error:
        raise InvalidInputError("The file is no video that can be read.", param=param, code=INVALID) from error


@dataclass(frozen=True, slots=True)
class _Timed:
    """A decoded frame, its time from the first one on, and how long it stands."""

    frame: av.VideoFrame
    time_s: float
    lasts_s: float


def _timed(data: bytes, limits: VideoLimits, param: str) -> Iterator[_Timed]:
    """Frames with their times, up to the limits."""
    with open_container(data) as container:
        # Cover pictures of sound files are no video.
        streams = [one for one in container.streams.video if not one.disposition & av.stream.Disposition.attached_pic]
        if not streams:
            raise InvalidInputError("The file holds no video.", param=param, code=NO_STREAM)
        stream = streams[0]
        _check_frame(stream.codec_context.width, stream.codec_context.height, limits, param)
        lasts_s = 1.0 / float(stream.average_rate or _DEFAULT_RATE_HZ)
        first_s, time_s, num_pixels = None, -lasts_s, 0
        # A frame larger than the header says is refused by the decoder, before it has memory.
        stream.codec_context.options = {"max_pixels": str(limits.max_pixels)}
        for frame in decoded_frames(container, stream, av.VideoFrame):
            _check_frame(frame.width, frame.height, limits, param)
            num_pixels += frame.width * frame.height
            if num_pixels > limits.max_decoded_pixels:
                raise InvalidInputError("The video has too many pixels in all its frames.", param=param, code=TOO_LARGE)
            if first_s is None:
                first_s = frame.time or 0.0
            # Times that stand still or run backwards are wrong: then the rate counts.
            own_s = frame.time - first_s if frame.time is not None else -1.0
            time_s = own_s if own_s > time_s else time_s + lasts_s
            if time_s > limits.max_s:
                raise InvalidInputError(
                    f"The video is longer than {limits.max_s:g} seconds.", param=param, code=TOO_LONG
                )
            yield _Timed(frame, time_s, lasts_s)


def _check_frame(width: int, height: int, limits: VideoLimits, param: str) -> None:
    if width * height > limits.max_pixels:
        raise InvalidInputError(
            f"The video is {width}x{height} pixels, {limits.max_pixels} are taken.", param=param, code=TOO_LARGE
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise InvalidInputError(
            f"The video is {width}x{height} pixels; at most {limits.max_aspect_ratio:g} to 1 is allowed.",
            param=param,
            code=BAD_ASPECT,
        )


def _kept(frames: Iterator[_Timed], max_frames: int) -> DecodedVideo:
    first, end_s, step_s = None, 0.0, _STEP_S
    kept: dict[int, tuple[float, RgbArray]] = {}  # by its step in time: the first frame that lies in it
    for one in frames:
        first = first or one.frame
        end_s = one.time_s + one.lasts_s
        if int(one.time_s / step_s) in kept:
            continue
        kept[int(one.time_s / step_s)] = (one.time_s, _upright_rgb(one.frame, first))
        while len(kept) > max_frames:
            step_s *= 2
            kept = _halved(kept)
    if first is None:
        raise ValueError("no frame could be decoded")
    is_turned = first.rotation % 180 != 0
    return DecodedVideo(
        frames=np.stack([rgb for _, rgb in kept.values()]),
        times_s=tuple(time_s for time_s, _ in kept.values()),
        duration_s=end_s,
        width=first.height if is_turned else first.width,
        height=first.width if is_turned else first.height,
    )


def _halved(kept: dict[int, tuple[float, RgbArray]]) -> dict[int, tuple[float, RgbArray]]:
    """The same in steps twice as long: of two in one step the first stays."""
    fewer: dict[int, tuple[float, RgbArray]] = {}
    for step, frame in kept.items():
        fewer.setdefault(step // 2, frame)
    return fewer


def _upright_rgb(frame: av.VideoFrame, first: av.VideoFrame) -> RgbArray:
    """In the size and the orientation of the first frame, scaled down to `_KEPT_PIXELS`."""
    scale = min(1.0, math.sqrt(_KEPT_PIXELS / (first.width * first.height)))
    width, height = max(1, int(first.width * scale)), max(1, int(first.height * scale))
    rgb = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
    return np.ascontiguousarray(np.rot90(rgb, first.rotation // 90))
