"""Settings of the decode service: environment variables `FLEET_DECODE_<NAME>`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """What a decode worker is told. `slots` bounds the requests it runs at once; each of their choices is one
    sequence of the engine."""

    model_config = SettingsConfigDict(
        env_prefix="FLEET_DECODE_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    runner: Literal["auto", "generate", "embed"] = Field(
        "auto",
        description="What the model makes: tokens or vectors; auto: a model folder says it, an id is `generate`.",
    )
    adapters_dir: str = Field(
        "", description="Folder whose entries are LoRA adapters, by the names clients use; empty: none are served."
    )
    max_images: int = Field(8, description="Images per request, as reported for a model that takes images.", ge=0)
    max_audios: int = Field(8, description="Recordings per request, as reported for a model that hears.", ge=0)
