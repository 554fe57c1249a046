"""Files of strangers into mono samples: duration, rate and channels are those of the data, never a header's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import av
import numpy as np
import numpy.typing as npt
import soxr

from fleet_common.errors import InvalidInputError
from fleet_preprocess.core.containers import UNREADABLE, decoded_frames, open_container

Samples = npt.NDArray[np.float32]

INVALID = "invalid_audio"
TOO_LONG = "audio_too_long"
NO_STREAM = "no_audio_stream"

#: Samples handed to the resampler at once; fewer cost more calls.
_BLOCK_SAMPLES = 16_384

_MAX_RATE_HZ = 768_000
_INTEGER_SCALE = {"u8": 128.0, "s16": 32_768.0, "s32": 2_147_483_648.0, "s64": 2.0**63}


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Caps on one file.

    Attributes:
        max_bytes: of the file.
        max_s: seconds, counted while decoding.
    """

    max_bytes: int = 26_214_400
    max_s: float = 900.0


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Mono samples.

    Attributes:
        samples: float32 [samples] at the rate asked for, in -1 to 1.
        sample_rate_hz, num_channels: of the file, as its first decoded frame has them (0 when it holds none).
    """

    samples: Samples
    sample_rate_hz: int
    num_channels: int


def decode_audio(data: bytes, limits: AudioLimits, rate_hz: int, *, param: str) -> DecodedAudio:
    """Decode an audio file, or the first sound track of a video, mix it down and resample it.

    Memory follows the limit, not the file: decoding stops at `limits.max_s`.

    Raises:
        InvalidInputError: `invalid_audio`, `no_audio_stream`, `audio_too_long`.
    """
    if not data:
        raise InvalidInputError("The file is empty.", param=param, code=INVALID)
    if len(data) > limits.max_bytes:
        raise InvalidInputError(
            f"The file has {len(data)} bytes, {limits.max_bytes} are taken.", param=param, code="audio_too_large"
        )
    try:
        if _claims_s(data) > limits.max_s:
            # It may be lying, so count; but without keeping what would then be thrown away.
            for _ in _counted(_frames(data, param), limits, param):
                pass
        return _resampled(_counted(_frames(data, param), limits, param), rate_hz)
    except UNREADABLE as error:
        raise InvalidInputError("The file is no audio that can be read.", param=param, code=INVALID) from error


def _claims_s(data: bytes) -> float:
    """Seconds by the headers, 0 where they do not tell."""
    with open_container(data) as container:
        return (container.duration or 0) / 1_000_000


def _frames(data: bytes, param: str) -> Iterator[av.AudioFrame]:
    with open_container(data) as container:
        if not container.streams.audio:
            raise InvalidInputError("The file holds no sound.", param=param, code=NO_STREAM)
        yield from decoded_frames(container, container.streams.audio[0], av.AudioFrame)


def _mono(frame: av.AudioFrame) -> Samples:
    """The mean of a frame's channels."""
    values = frame.to_ndarray()
    num_channels = _num_channels(frame)
    planes = values if frame.format.is_planar else values.reshape(-1, num_channels).T
    mixed = planes[0] if num_channels == 1 else planes.mean(axis=0, dtype=np.float32)
    samples: Samples = mixed.astype(np.float32, copy=False)
    name = frame.format.name.removesuffix("p")
    scale = _INTEGER_SCALE.get(name)
    if scale is None:
        finite: Samples = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0)
        return finite
    middle = np.float32(scale if name == "u8" else 0.0)
    scaled: Samples = np.multiply(samples - middle, np.float32(1.0 / scale), dtype=np.float32)
    return scaled


def _num_channels(frame: av.AudioFrame) -> int:
    return max(1, frame.layout.nb_channels)


def _counted(frames: Iterator[av.AudioFrame], limits: AudioLimits, param: str) -> Iterator[av.AudioFrame]:
    """The same frames, up to the limit. Raises InvalidInputError beyond it."""
    seconds = 0.0
    for frame in frames:
        if not 0 < frame.sample_rate <= _MAX_RATE_HZ:
            raise ValueError(f"a sample rate of {frame.sample_rate} Hz")
        seconds += frame.samples / frame.sample_rate
        if seconds > limits.max_s:
            raise InvalidInputError(f"The audio is longer than {limits.max_s:g} seconds.", param=param, code=TOO_LONG)
        yield frame


def _resampled(frames: Iterator[av.AudioFrame], rate_hz: int) -> DecodedAudio:
    """One stretch after the other: the rate may change within a file."""
    parts: list[Samples] = []
    stretch: _Stretch | None = None
    source_hz = num_channels = 0
    for frame in frames:
        source_hz, num_channels = source_hz or frame.sample_rate, num_channels or _num_channels(frame)
        if stretch is None or stretch.rate_hz != frame.sample_rate:
            if stretch is not None:
                parts.append(stretch.end())
            stretch = _Stretch(frame.sample_rate, rate_hz)
        parts.append(stretch.add(_mono(frame)))
    if stretch is not None:
        parts.append(stretch.end())
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return DecodedAudio(samples=samples, sample_rate_hz=source_hz, num_channels=num_channels)


class _Stretch:
    """Frames of one rate on their way through the resampler."""

    def __init__(self, rate_hz: int, wanted_hz: int) -> None:
        self.rate_hz = rate_hz
        self._waiting: list[Samples] = []
        self._num_waiting = 0
        self._stream = soxr.ResampleStream(rate_hz, wanted_hz, 1, dtype="float32") if rate_hz != wanted_hz else None

    def add(self, samples: Samples) -> Samples:
        """What comes out of the resampler now."""
        self._waiting.append(samples)
        self._num_waiting += samples.shape[0]
        return self._push(is_last=False) if self._num_waiting >= _BLOCK_SAMPLES else np.zeros(0, np.float32)

    def end(self) -> Samples:
        """The rest."""
        return self._push(is_last=True)

    def _push(self, *, is_last: bool) -> Samples:
        block = np.concatenate(self._waiting) if self._waiting else np.zeros(0, np.float32)
        self._waiting, self._num_waiting = [], 0
        if self._stream is None:
            return block
        out: Samples = self._stream.resample_chunk(block, last=is_last)
        return out
