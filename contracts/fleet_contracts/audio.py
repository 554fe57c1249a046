"""Stages `audio_transcribe` and `audio_speak`: samples in, a transcript out; text in, speech out (both as chunks)."""

from __future__ import annotations

from fleet_contracts.base import Contract

#: Media type of the chunks of a transcript: a `TranscriptHead`, then one `TranscriptSegment` each, as MessagePack.
TRANSCRIPT_MEDIA_TYPE = "application/vnd.fleet.transcript+msgpack"

#: Media type of the chunks of speech, one per sentence: 16-bit little-endian mono samples.
PCM_MEDIA_TYPE = "audio/pcm;rate={sample_rate_hz}"


def pcm_media_type(sample_rate_hz: int) -> str:
    """Media type of speech at a sample rate in Hz."""
    return PCM_MEDIA_TYPE.format(sample_rate_hz=sample_rate_hz)


def pcm_sample_rate_hz(media_type: str) -> int:
    """Sample rate in Hz of a chunk of speech. ValueError when it is something else."""
    head, _, rate = media_type.partition("rate=")
    if head != PCM_MEDIA_TYPE.partition("{")[0].removesuffix("rate=") or not rate.isdigit() or int(rate) == 0:
        raise ValueError(f"not PCM: {media_type}")
    return int(rate)


class TranscribeParams(Contract, frozen=True, kw_only=True, tag="audio_transcribe.v1"):
    """Parameters of a transcription. The step reads `audio0` of preprocess: float32 [samples], mono, 16 kHz.

    Attributes:
        language: ISO 639-1 code, "" = found out.
        prompt: text that came before, for spelling and style.
        temperature: 0 = greedy, falling back to sampling where a passage comes out repetitive.
        word_timestamps: also tell where each word is.
    """

    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    word_timestamps: bool = False


class SpeakParams(Contract, frozen=True, kw_only=True, tag="audio_speak.v1"):
    """Parameters of a synthesis. The text is the step's root (UTF-8), or `text` (uint8 [bytes]) of the step before.

    Attributes:
        voice: name, "" = the model's default.
        speed: 1 = the voice's own pace.
        format: what the client gets; made at the ingress, the step itself always speaks PCM.
    """

    voice: str = ""
    speed: float = 1.0
    format: str = "wav"


class TranscriptWord(Contract, frozen=True, kw_only=True):
    """One word and where it is, in seconds from the start of the audio."""

    text: str
    start_s: float
    end_s: float
    probability: float = 0.0


class TranscriptHead(Contract, frozen=True, kw_only=True, tag="transcript_head.v1"):
    """First chunk of a transcript.

    Attributes:
        language: ISO 639-1 code.
        duration_s: seconds of audio as decoded.
    """

    language: str
    duration_s: float


class TranscriptSegment(Contract, frozen=True, kw_only=True, tag="transcript_segment.v1"):
    """One passage, as soon as it is known.

    Attributes:
        text: with the blank before its first word.
        start_s, end_s: seconds from the start of the audio.
        token_ids: of the model's own vocabulary.
        temperature: what the passage was sampled with.
        avg_logprob, compression_ratio, no_speech_prob: how far it can be trusted, as Whisper has them.
    """

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[TranscriptWord, ...] = ()


TranscriptPart = TranscriptHead | TranscriptSegment
