"""Chooses stage and engine from the settings."""

from __future__ import annotations

from fleet_audio.engine.port import Speaker, Transcriber
from fleet_audio.engine.scripted import ScriptedSpeaker, ScriptedTranscriber
from fleet_audio.settings import AudioSettings
from fleet_audio.worker import SpeakEngine, TranscribeEngine
from fleet_contracts.base import Stage


def build_engine(settings: AudioSettings) -> TranscribeEngine | SpeakEngine:
    """The stage's engine; nothing is loaded yet. ValueError for an unknown engine name."""
    if settings.engine not in ("real", "scripted"):
        raise ValueError(f"unknown engine {settings.engine!r}: real or scripted")
    if settings.stage == Stage.AUDIO_TRANSCRIBE.value:
        return TranscribeEngine(settings.model, _transcriber(settings), slots=settings.slots)
    return SpeakEngine(
        settings.model,
        _speaker(settings),
        slots=settings.slots,
        max_text_chars=settings.max_text_chars,
        sentence_chars=settings.sentence_chars,
        voice_aliases=settings.voice_aliases,
    )


def _transcriber(settings: AudioSettings) -> Transcriber:
    if settings.engine == "scripted":
        return ScriptedTranscriber(settings.engine_args)
    from fleet_audio.engine.whisper import WhisperTranscriber  # the scripted engines need no model libraries

    path = settings.model_path or settings.model
    return WhisperTranscriber(path, settings.engine_args, num_threads=settings.threads, num_workers=settings.slots)


def _speaker(settings: AudioSettings) -> Speaker:
    if settings.engine == "scripted":
        return ScriptedSpeaker(settings.engine_args)
    from fleet_audio.engine.hibari import HibariSpeaker

    return HibariSpeaker(settings.model_path, settings.engine_args, num_threads=settings.threads)
