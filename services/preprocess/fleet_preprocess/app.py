"""Chooses the engine from the settings."""

from __future__ import annotations

import secrets

import httpx

from fleet_preprocess.audio_worker import AudioPreprocessEngine
from fleet_preprocess.core.audio import AudioLimits
from fleet_preprocess.core.budget import PixelBudgets
from fleet_preprocess.core.limits import MediaLimits, VideoLimits
from fleet_preprocess.core.media_url import parse_allowed_hosts
from fleet_preprocess.engine.port import PromptEngine
from fleet_preprocess.engine.scripted import ScriptedPromptEngine
from fleet_preprocess.fetch import FetchLimits, MediaFetcher
from fleet_preprocess.file_worker import FileEngine
from fleet_preprocess.picture_worker import PicturePreprocessEngine
from fleet_preprocess.settings import PreprocessSettings
from fleet_preprocess.worker import PreprocessEngine


def build_engine(settings: PreprocessSettings) -> PreprocessEngine | FileEngine:
    """The stage's engine; nothing is loaded yet. ValueError for an unknown engine name."""
    if settings.kind == "audio":
        return AudioPreprocessEngine(
            settings.model,
            _audio_limits(settings),
            num_threads=settings.threads,
            max_batch=settings.max_batch,
        )
    limits = MediaLimits(
        max_bytes=settings.max_image_bytes,
        max_pixels=settings.max_image_pixels,
        max_aspect_ratio=settings.max_aspect_ratio,
        max_images=settings.max_images,
        max_audios=settings.max_audios,
        audio=_audio_limits(settings),
        video=VideoLimits(
            max_bytes=settings.max_video_bytes,
            max_s=settings.max_video_s,
            max_frames=settings.max_video_frames,
            max_pixels=settings.max_video_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        ),
    )
    if settings.kind == "picture":
        return PicturePreprocessEngine(
            settings.model, limits, num_threads=settings.threads, max_batch=settings.max_batch
        )
    return PreprocessEngine(
        settings.model,
        _build_prompts(settings),
        limits,
        budgets=PixelBudgets(max_pixels=settings.max_pixels, low_detail_pixels=settings.low_detail_pixels),
        fetcher=_build_fetcher(settings),
        context_tokens=settings.context_tokens,
        num_threads=settings.threads,
        max_batch=settings.max_batch,
    )


def _audio_limits(settings: PreprocessSettings) -> AudioLimits:
    return AudioLimits(max_bytes=settings.max_audio_bytes, max_s=settings.max_audio_s)


def _build_prompts(settings: PreprocessSettings) -> PromptEngine:
    if settings.engine == "scripted":
        return ScriptedPromptEngine(settings.engine_args)
    if settings.engine != "real":
        raise ValueError(f"unknown engine {settings.engine!r}: real or scripted")
    from fleet_preprocess.engine.real import CheckpointPromptEngine  # the scripted engine needs no model libraries

    nonce = secrets.token_hex(16)
    return CheckpointPromptEngine(settings.model_path or settings.model, settings.engine_args, nonce)


def _build_fetcher(settings: PreprocessSettings) -> MediaFetcher | None:
    if not settings.allowed_media_hosts:
        return None
    limits = FetchLimits(settings.fetch_timeout_s, settings.max_redirects)
    transport = httpx.AsyncHTTPTransport(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
    return MediaFetcher(parse_allowed_hosts(settings.allowed_media_hosts), limits, transport=transport)
