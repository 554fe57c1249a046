"""What the audio routes take and answer, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
TRANSCRIPT_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")

#: Formats of a transcript that is streamed.
STREAMED_FORMATS = ("json", "text")


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/audio/speech`.

    Attributes:
        input: the text to say.
        voice: a name from the model's card; absent: its default.
        response_format: absent: mp3, as OpenAI has it.
        speed: 1 = the voice's own pace; a model may take less than this range.
        stream_format: only `audio`: the answer is always sent as it is made.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    input: str
    voice: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    response_format: str | None = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4.0)] | None = None
    stream_format: str | None = None
    priority: Literal["realtime", "batch", "background"] | None = None


class TranscriptionForm(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the form of `/v1/audio/transcriptions`, for the document; the form itself is read by hand."""

    model: str
    file: bytes
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool | None = None
    priority: Literal["realtime", "batch", "background"] | None = None


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Audio is counted in seconds, not in tokens."""

    type: str = "duration"
    seconds: float


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format: json`."""

    text: str
    usage: DurationUsage


class SegmentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One passage; times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordReport(msgspec.Struct, frozen=True, kw_only=True):
    """One word; times in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format: verbose_json`. `duration` is that of the decoded audio, `language` an ISO 639-1 code."""

    task: str = "transcribe"
    language: str
    duration: float
    text: str
    segments: list[SegmentReport] | UnsetType = UNSET
    words: list[WordReport] | UnsetType = UNSET
    usage: DurationUsage


class TranscriptDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed piece of a transcript."""

    type: str = "transcript.text.delta"
    delta: str


class TranscriptDone(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a streamed transcript, with the whole text."""

    type: str = "transcript.text.done"
    text: str
    usage: DurationUsage
