"""Settings of the audio service (`FLEET_AUDIO_*`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import WorkerSettings, stage_prefix
from fleet_contracts.base import Stage


class AudioSettings(WorkerSettings):
    """What an audio worker is told. `engine_args`: see `whisper.py`, `hibari.py` and `scripted.py` in `engine/`."""

    model_config = SettingsConfigDict(env_prefix=stage_prefix(Stage.AUDIO_SPEAK))

    stage: Literal["audio_transcribe", "audio_speak"] = Field(description="What this worker does.")
    slots: int = Field(2, description="Requests at once.", ge=1)
    threads: int = Field(1, description="Compute threads of the model.", ge=1)
    max_text_chars: int = Field(4096, description="Characters of one speech.", ge=1)
    sentence_chars: int = Field(240, description="Longest piece of text spoken at once.", ge=20)
    voice_aliases: dict[str, str] = Field(
        default_factory=lambda: {"alloy": "", "default": ""},
        description="Further names of voices; an empty value is the model's default voice.",
    )
