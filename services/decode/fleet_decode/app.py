"""Chooses the engine; everything else of a worker's life is the host's."""

from __future__ import annotations

from pathlib import Path

from fleet_common.checkpoints import makes_embeddings
from fleet_common.errors import FleetError
from fleet_decode.embed_worker import EmbedEngine
from fleet_decode.engine.embed_port import Embedder
from fleet_decode.engine.port import TokenEngine
from fleet_decode.settings import DecodeSettings
from fleet_decode.worker import DecodeEngine


class UnknownEngineError(FleetError):
    """`FLEET_DECODE_ENGINE` names no engine."""

    code = "unknown_engine"


def build_engine(settings: DecodeSettings) -> DecodeEngine | EmbedEngine:
    """The stage engine of these settings; nothing is loaded before its `start`."""
    if _is_embedding(settings):
        return EmbedEngine(_embedder(settings), model=settings.model, slots=settings.slots)
    return DecodeEngine(
        _token_engine(settings),
        model=settings.model,
        slots=settings.slots,
        max_images=settings.max_images,
        max_audios=settings.max_audios,
    )


def _is_embedding(settings: DecodeSettings) -> bool:
    if settings.runner != "auto":
        return settings.runner == "embed"
    folder = Path(settings.model_path).expanduser()
    return bool(settings.model_path) and folder.is_dir() and makes_embeddings(folder)


def _embedder(settings: DecodeSettings) -> Embedder:
    match settings.engine:
        case "real":
            from fleet_decode.engine.encoder import TransformersEmbedder

            return TransformersEmbedder(settings.model_path or settings.model, settings.engine_args)
        case "scripted":
            from fleet_decode.engine.embed_scripted import ScriptedEmbedder

            return ScriptedEmbedder(settings.engine_args)
        case other:
            raise UnknownEngineError(f"engine must be real or scripted, not {other!r}")


def _token_engine(settings: DecodeSettings) -> TokenEngine:
    match settings.engine:
        case "real":
            from fleet_decode.engine.vllm import VllmEngine

            return VllmEngine(
                settings.model_path,
                slots=settings.slots,
                engine_args=settings.engine_args,
                adapters_dir=Path(settings.adapters_dir) if settings.adapters_dir else None,
            )
        case "scripted":
            from fleet_decode.engine.scripted import ScriptedEngine

            return ScriptedEngine(settings.engine_args)
        case other:
            raise UnknownEngineError(f"engine must be real or scripted, not {other!r}")
