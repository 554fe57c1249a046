"""Speech in the formats clients ask for: samples in as they are made, bytes of the file out at once."""

from __future__ import annotations

import struct
from typing import Protocol, cast

import av
import numpy as np

CONTENT_TYPES = {
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "aac": b"audio/aac",
    "flac": b"audio/flac",
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
}

_BYTES_PER_SAMPLE = 2
#: Length of a WAV whose end is not known yet: as large as its field can say, for players to read to the end.
_OPEN_END = 0xFFFFFFFF
_WAV_HEAD_BYTES = 36

#: format -> (container, codec, bits per second or 0, options of the container). None of them is patched at the end.
_CODECS: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "mp3": ("mp3", "libmp3lame", 64_000, {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("ogg", "libopus", 32_000, {}),
    "aac": ("adts", "aac", 64_000, {}),
    "flac": ("flac", "flac", 0, {}),
}


class SpeechWriter(Protocol):
    """Writes one file. Methods block for milliseconds per second of speech: run them in a thread."""

    def add(self, pcm: bytes) -> bytes:
        """Take 16-bit mono samples; returns what can be sent now."""

    def end(self) -> bytes:
        """The rest of the file."""


def open_writer(response_format: str, rate_hz: int, num_bytes: int | None = None) -> SpeechWriter:
    """A writer of a format of `CONTENT_TYPES`.

    Args:
        num_bytes: of all samples, where that is known already.
    """
    if response_format == "pcm":
        return _PcmWriter()
    if response_format == "wav":
        return _WavWriter(rate_hz, num_bytes)
    return _EncodedWriter(*_CODECS[response_format], rate_hz=rate_hz)


class _PcmWriter:
    def add(self, pcm: bytes) -> bytes:
        return pcm

    def end(self) -> bytes:
        return b""


class _WavWriter:
    def __init__(self, rate_hz: int, num_bytes: int | None) -> None:
        self._head = wav_head(rate_hz, num_bytes)

    def add(self, pcm: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + pcm

    def end(self) -> bytes:
        return self.add(b"")


def wav_head(rate_hz: int, num_bytes: int | None) -> bytes:
    """Head of a 16-bit mono WAV file; its length is that of the data, or open, never 0."""
    is_known = num_bytes is not None and num_bytes + _WAV_HEAD_BYTES < _OPEN_END
    data_bytes = num_bytes if num_bytes is not None and is_known else _OPEN_END
    file_bytes = data_bytes + _WAV_HEAD_BYTES if is_known else _OPEN_END
    layout = struct.pack("<HHIIHH", 1, 1, rate_hz, rate_hz * _BYTES_PER_SAMPLE, _BYTES_PER_SAMPLE, 16)
    return b"".join(
        (
            struct.pack("<4sI4s", b"RIFF", file_bytes, b"WAVE"),
            struct.pack("<4sI", b"fmt ", len(layout)),
            layout,
            struct.pack("<4sI", b"data", data_bytes),
        )
    )


class _Outlet:
    """Where a container writes; it has no `seek`, so nothing written is changed again."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class _EncodedWriter:
    def __init__(self, container: str, codec: str, bit_rate: int, options: dict[str, str], *, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._outlet = _Outlet()
        self._container = av.open(self._outlet, mode="w", format=container, container_options=options)
        self._stream = cast("av.AudioStream", self._container.add_stream(codec, rate=rate_hz, layout="mono"))
        if bit_rate:
            self._stream.bit_rate = bit_rate

    def add(self, pcm: bytes) -> bytes:
        if pcm:
            samples = np.frombuffer(pcm, dtype="<i2")[np.newaxis]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = self._rate_hz
            self._mux(frame)
        return self._outlet.take()

    def end(self) -> bytes:
        self._mux(None)
        self._container.close()
        return self._outlet.take()

    def _mux(self, frame: av.AudioFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
