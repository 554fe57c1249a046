"""Settings of the preprocess service (`FLEET_PREPROCESS_*`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import WorkerSettings, stage_prefix
from fleet_contracts.base import Stage

# Pillow itself refuses more than twice its own limit, whatever is set here.
_PILLOW_MAX_PIXELS = 178_000_000


class PreprocessSettings(WorkerSettings):
    """What a preprocess worker is told. `engine_args` become variables of the chat template."""

    model_config = SettingsConfigDict(env_prefix=stage_prefix(Stage.PREPROCESS))

    kind: Literal["prompt", "audio", "picture"] = Field(
        "prompt",
        description="`prompt`: messages and pictures of a chat model; `audio`: files for a model that hears; "
        "`picture`: files for one that edits pictures.",
    )
    threads: int = Field(2, description="Threads that decode, resize and tokenize.", ge=1)
    max_batch: int = Field(1, description="Requests per engine call; more only makes them wait for each other.", ge=1)
    context_tokens: int = Field(0, description="Context to enforce; 0: what the model's config says.", ge=0)
    max_images: int = Field(8, description="Images and videos per request.", ge=0)
    max_audios: int = Field(8, description="Recordings per request.", ge=0)
    max_image_bytes: int = Field(20 << 20, description="Encoded bytes of one image.", ge=1)
    max_image_pixels: int = Field(40_000_000, description="Pixels of one image.", ge=1, le=_PILLOW_MAX_PIXELS)
    max_aspect_ratio: float = Field(200.0, description="Longer side over shorter side of an image.", ge=1)
    max_pixels: int = Field(0, description="Pixel budget of every image; 0: the model's own.", ge=0)
    low_detail_pixels: int = Field(512 * 512, description="Budget of `detail: low`; 0: as any other.", ge=0)
    allowed_media_hosts: tuple[str, ...] = Field(
        (), description="Hosts media may be fetched from, `host` or `host:port`; empty: data: URLs only."
    )
    fetch_timeout_s: float = Field(10.0, description="Longest fetch of one medium, redirects included.", gt=0)
    max_redirects: int = Field(3, description="Redirects followed per fetch.", ge=0)
    max_audio_bytes: int = Field(25 << 20, description="Bytes of one audio file.", ge=1)
    max_video_bytes: int = Field(20 << 20, description="Bytes of one video file.", ge=1)
    max_video_s: float = Field(120.0, description="Seconds of one video, counted while decoding.", gt=0)
    max_video_frames: int = Field(16, description="Frames of a video that a model gets to see.", ge=1)
    max_video_pixels: int = Field(8_847_360, description="Pixels of one frame as it was sent.", ge=1)
    max_audio_s: float = Field(900.0, description="Seconds of one audio file, counted while decoding.", gt=0)
