"""Audio and video files of strangers: which containers are opened, and what a broken packet does."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import av

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frame = TypeVar("Frame", av.AudioFrame, av.VideoFrame)

#: Containers that hold their own media: no playlist, which would name other files.
_FORMATS = "wav,w64,aiff,au,mp3,flac,ogg,matroska,webm,mov,mp4,m4a,3gp,aac,avi,mpegts,amr,caf,asf,opus"

#: What FFmpeg's decoders and PyAV raise on hostile or damaged files.
UNREADABLE = (av.error.FFmpegError, ValueError, MemoryError)


def open_container(data: bytes) -> InputContainer:
    """Open a file for reading. Raises one of `UNREADABLE`."""
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
    return av.open(io.BytesIO(data), mode="r", metadata_errors="ignore", options=options)


def decoded_frames(container: InputContainer, stream: AudioStream | VideoStream, kind: type[Frame]) -> Iterator[Frame]:
    """Frames of one track. A broken packet is a click or a gap, unless there is nothing but broken packets.

    Raises:
        av.error.InvalidDataError: nothing could be decoded.
    """
    num_frames, failure = 0, None
    for packet in container.demux(stream):
        try:
            decoded = packet.decode()
        except av.error.InvalidDataError as error:
            failure = error
            continue
        num_frames += len(decoded)
        yield from (frame for frame in decoded if isinstance(frame, kind))
    if failure is not None and not num_frames:
        raise failure
