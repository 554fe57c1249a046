"""Settings of the diffusion service (`FLEET_DIFFUSION_*`)."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import WorkerSettings, stage_prefix
from fleet_contracts.base import Stage


class DiffusionSettings(WorkerSettings):
    """What a diffusion worker is told. `slots`: pictures in work. `engine_args`: see `engine/`."""

    model_config = SettingsConfigDict(env_prefix=stage_prefix(Stage.DIFFUSION_GENERATE))

    threads: int = Field(1, description="Compute threads of torch.", ge=1)
    max_batch: int = Field(8, description="Pictures per pass of the denoiser.", ge=1)
    lanes: int = Field(64, description="Requests taken in at once; what has no slot waits its turn by urgency.", ge=1)
    aging_s: float = Field(30.0, description="A picture that waited this long counts as most urgent.", gt=0)
    cache_bytes: int = Field(64 << 20, description="Conditioning of prompts kept; 0: none.", ge=0)
    max_side: int = Field(1024, description="Longest side of a picture in pixels.", ge=8)
    max_pixels: int = Field(1024 * 1024, description="Largest picture in pixels.", ge=64)
    max_steps: int = Field(100, description="Most denoising steps.", ge=1)
    max_pictures: int = Field(10, description="Most pictures per request.", ge=1)
    max_images: int = Field(4, description="Most pictures an edit begins from; 0: no edits.", ge=0, le=16)
    max_prompt_chars: int = Field(4000, description="Longest prompt.", ge=1, le=4000)
    default_steps: int = Field(0, description="Steps of a request that names none; 0: as the pipeline has it.", ge=0)
    default_guidance: float | None = Field(None, description="Guidance of a request that names none; unset: likewise.")
