"""Video files for tests, written by PyAV."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt

Rgb = npt.NDArray[np.uint8]


def video_file(
    frames: Sequence[Rgb],
    rate_hz: int = 10,
    container: str = "mp4",
    codec: str = "mpeg4",
    pix_fmt: str = "yuv420p",
    times: Sequence[int] | None = None,
) -> bytes:
    """Frames of one size, uint8 [height, width, 3], without sound.

    Args:
        times: of each frame, in 1 / `rate_hz`; None: one after the other.
    """
    sink = io.BytesIO()
    with av.open(sink, mode="w", format=container) as out:
        stream = out.add_stream(codec, rate=rate_hz)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for time, rgb in zip(times or range(len(frames)), frames, strict=True):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, rate_hz)
            for packet in stream.encode(frame):
                out.mux(packet)
        for packet in stream.encode(None):
            out.mux(packet)
    return sink.getvalue()


def plain(grey: int, height: int = 64, width: int = 64) -> Rgb:
    """One frame of one grey."""
    return np.full((height, width, 3), grey, np.uint8)
