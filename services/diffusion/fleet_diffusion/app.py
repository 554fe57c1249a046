"""Chooses the engine from the settings."""

from __future__ import annotations

from fleet_common.telemetry.names import WorkerMetrics
from fleet_diffusion.core.limits import Caps
from fleet_diffusion.core.steps import StepPolicy
from fleet_diffusion.engine.port import PictureModel
from fleet_diffusion.engine.scripted import ScriptedModel
from fleet_diffusion.settings import DiffusionSettings
from fleet_diffusion.worker import DiffusionEngine


def build_engine(settings: DiffusionSettings, metrics: WorkerMetrics) -> DiffusionEngine:
    """The stage's engine; nothing is loaded yet. ValueError for an unknown engine name."""
    return DiffusionEngine(
        _build_model(settings),
        metrics,
        name=settings.model,
        caps=Caps(
            max_side=settings.max_side,
            max_pixels=settings.max_pixels,
            max_steps=settings.max_steps,
            max_pictures=settings.max_pictures,
            max_prompt_chars=settings.max_prompt_chars,
            max_images=settings.max_images,
            default_steps=settings.default_steps,
            default_guidance=settings.default_guidance,
        ),
        policy=StepPolicy(slots=settings.slots, max_batch=settings.max_batch, aging_s=settings.aging_s),
        lanes=settings.lanes,
    )


def _build_model(settings: DiffusionSettings) -> PictureModel:
    if settings.engine == "scripted":
        return ScriptedModel(settings.engine_args)
    if settings.engine != "real":
        raise ValueError(f"unknown engine {settings.engine!r}: real or scripted")
    from fleet_diffusion.engine.real import DiffusersModel  # the scripted engine needs no torch

    return DiffusersModel(
        settings.model_path or settings.model,
        settings.engine_args,
        num_threads=settings.threads,
        cache_bytes=settings.cache_bytes,
    )
