"""Chooses the engine from the settings."""

from __future__ import annotations

from fleet_common.telemetry.names import WorkerMetrics
from fleet_vision.core.batches import BatchLimits
from fleet_vision.engine.port import VisionEncoder
from fleet_vision.engine.scripted import ScriptedEncoder
from fleet_vision.settings import VisionSettings
from fleet_vision.worker import VisionEngine


def build_engine(settings: VisionSettings, metrics: WorkerMetrics) -> VisionEngine:
    """The stage's engine; nothing is loaded yet. ValueError for an unknown engine name."""
    return VisionEngine(
        settings.model,
        _build_encoder(settings),
        metrics,
        cache_bytes=settings.cache_bytes,
        limits=BatchLimits(settings.max_batch, max_patches=settings.max_pack_patches, align=settings.align),
        dtype=settings.dtype,
    )


def _build_encoder(settings: VisionSettings) -> VisionEncoder:
    if settings.engine == "scripted":
        return ScriptedEncoder(settings.engine_args)
    if settings.engine != "real":
        raise ValueError(f"unknown engine {settings.engine!r}: real or scripted")
    from fleet_vision.engine.real import CheckpointEncoder  # the scripted engine needs no torch

    return CheckpointEncoder(settings.model_path or settings.model, settings.engine_args, num_threads=settings.threads)
