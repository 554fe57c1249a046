"""A transcript in the formats clients ask for. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from fleet_contracts import codec
from fleet_contracts.audio import TranscriptHead, TranscriptSegment
from fleet_ingress.api.audio import (
    DurationUsage,
    SegmentReport,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
    WordReport,
)
from fleet_ingress.core.media_stream import MediaDelta

#: Whisper counts its windows in hundredths of a second.
_SEEK_PER_S = 100

CONTENT_TYPES = {
    "json": b"application/json",
    "verbose_json": b"application/json",
    "text": b"text/plain; charset=utf-8",
    "srt": b"application/x-subrip; charset=utf-8",
    "vtt": b"text/vtt; charset=utf-8",
}


@dataclass(slots=True)
class Transcript:
    """What was heard so far."""

    head: TranscriptHead = field(default_factory=lambda: TranscriptHead(language="", duration_s=0.0))
    segments: list[TranscriptSegment] = field(default_factory=list)

    def add(self, deltas: Iterable[MediaDelta]) -> list[TranscriptSegment]:
        """Take chunks in, in their order; returns the passages among them. Raises DecodeError for foreign bytes."""
        fresh = []
        for delta in deltas:
            part = codec.decode_transcript_part(delta.data)
            if isinstance(part, TranscriptHead):
                self.head = part
            else:
                fresh.append(part)
        self.segments += fresh
        return fresh

    @property
    def text(self) -> str:
        """The whole text, without blanks around it."""
        return "".join(segment.text for segment in self.segments).strip()

    def body(self, response_format: str, granularities: Sequence[str]) -> bytes:
        """The whole answer."""
        match response_format:
            case "text":
                return f"{self.text}\n".encode()
            case "srt":
                return srt(self.segments).encode()
            case "vtt":
                return vtt(self.segments).encode()
            case "verbose_json":
                return msgspec.json.encode(self._verbose(granularities))
            case _:
                return msgspec.json.encode(Transcription(text=self.text, usage=self._usage()))

    def event(self, segment: TranscriptSegment, *, is_first: bool) -> bytes:
        """Server-sent event of one passage."""
        text = segment.text.lstrip() if is_first else segment.text
        return _event(TranscriptDelta(delta=text))

    def last_event(self) -> bytes:
        """Server-sent event of the end."""
        return _event(TranscriptDone(text=self.text, usage=self._usage()))

    def _usage(self) -> DurationUsage:
        return DurationUsage(seconds=math.ceil(self.head.duration_s))

    def _verbose(self, granularities: Sequence[str]) -> VerboseTranscription:
        words = [word for segment in self.segments for word in segment.words]
        return VerboseTranscription(
            language=self.head.language,
            duration=round(self.head.duration_s, 3),
            text=self.text,
            segments=[_report(number, segment) for number, segment in enumerate(self.segments)]
            if "segment" in granularities
            else UNSET,
            words=[WordReport(word=word.text.strip(), start=word.start_s, end=word.end_s) for word in words]
            if "word" in granularities
            else UNSET,
            usage=self._usage(),
        )


def srt(segments: Sequence[TranscriptSegment]) -> str:
    """SubRip."""
    return "\n".join(
        f"{number}\n{_clock(segment.start_s, ',')} --> {_clock(segment.end_s, ',')}\n{_line(segment)}\n"
        for number, segment in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[TranscriptSegment]) -> str:
    """WebVTT; its head alone where nothing was said."""
    cues = [
        f"\n{_clock(segment.start_s, '.')} --> {_clock(segment.end_s, '.')}\n{_line(segment)}\n" for segment in segments
    ]
    return "WEBVTT\n" + "".join(cues)


def _line(segment: TranscriptSegment) -> str:
    # An arrow would be read as the times of another cue.
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, separator: str) -> str:
    milliseconds = round(max(0.0, seconds) * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{separator}{milliseconds:03d}"


def _report(number: int, segment: TranscriptSegment) -> SegmentReport:
    return SegmentReport(
        id=number,
        seek=int(segment.start_s * _SEEK_PER_S),
        start=segment.start_s,
        end=segment.end_s,
        text=segment.text,
        tokens=list(segment.token_ids),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
