"""Audio files for tests, written by PyAV."""

from __future__ import annotations

import io

import av
import numpy as np
import numpy.typing as npt

from tests.support.video_files import plain, video_file

Samples = npt.NDArray[np.float32]


def tone(seconds: float, rate_hz: int = 16_000, hertz: float = 440.0) -> Samples:
    """A sine, float32 [samples]."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(np.float32)


def wav(samples: npt.NDArray[np.float32], rate_hz: int = 16_000, channels: int = 1) -> bytes:
    """16-bit WAV of interleaved samples, the header made by hand so that tests can lie in it."""
    data = (samples * 32767).astype("<i2").tobytes()
    block = 2 * channels
    head = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    head += (1).to_bytes(2, "little") + channels.to_bytes(2, "little") + rate_hz.to_bytes(4, "little")
    head += (rate_hz * block).to_bytes(4, "little") + block.to_bytes(2, "little") + (16).to_bytes(2, "little")
    return head + b"data" + len(data).to_bytes(4, "little") + data


class _Pipe(io.RawIOBase):
    """A sink that cannot seek, as a browser's recorder writes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(bytes(data))  # type: ignore[call-overload]


def encoded(samples: Samples, container: str, codec: str, rate_hz: int = 16_000, *, seekable: bool = True) -> bytes:
    """Mono samples in a container."""
    sink = io.BytesIO() if seekable else _Pipe()
    with av.open(sink, mode="w", format=container) as out:
        stream = out.add_stream(codec, rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[np.newaxis], format="fltp", layout="mono")
        frame.sample_rate = rate_hz
        for packet in (*stream.encode(frame), *stream.encode(None)):
            out.mux(packet)
    return sink.getvalue() if isinstance(sink, io.BytesIO) else bytes(sink.data)


def silent_video() -> bytes:
    """An MP4 with pictures and no sound."""
    return video_file([plain(number) for number in range(5)], rate_hz=10)
