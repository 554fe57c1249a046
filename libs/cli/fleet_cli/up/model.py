"""Which models the fleet serves, and where they come from."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_cli.errors import CliError
from fleet_cli.up.settings import UpSettings
from fleet_cli.up.spec import (
    ServedModel,
    chat_model,
    drawing_model,
    embedding_model,
    hearing_model,
    speaking_model,
)
from fleet_common.checkpoints import makes_embeddings
from fleet_contracts.base import Stage
from fleet_contracts.models import ModelSpec
from fleet_models import PREPARE

#: Room for LoRA adapters: in one batch, in memory, and their rank.
_ADAPTER_ARGS: Mapping[str, Any] = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 32, "max_lora_rank": 16}

#: Ids of models that hear have it in their names.
_HEARING_ID = "whisper"

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


def is_local_name(name: str) -> bool:
    """One of the small models that `fleet models prepare` makes."""
    return name in PREPARE


def shown_name(source: str) -> str:
    """What clients call a model unless somebody names it: a local name, a Hugging Face id, or a folder's name."""
    if is_local_name(source) or _HUB_ID.match(source):
        return source
    return Path(source).expanduser().resolve().name


def absolute_source(source: str) -> str:
    """A model as somebody else finds it who works in another folder."""
    folder = Path(source).expanduser()
    is_path = folder.is_dir() or folder.is_absolute() or source.startswith(".")
    return str(folder.resolve()) if is_path else source


def drawing_sources(settings: UpSettings) -> tuple[str, ...]:
    """The model of `FLEET_IMAGE_MODEL`, when there is one."""
    return (settings.image_model,) if settings.image_model else ()


def served_name(source: str) -> str:
    """What clients call a model of the settings, "" for none."""
    return shown_name(source) if source else ""


def audio_sources(settings: UpSettings) -> tuple[str, ...]:
    """The models for hearing and speaking that are wanted."""
    return tuple(source for source in (settings.transcribe_model, settings.speech_model) if source)


def sources(text: str) -> tuple[str, ...]:
    """The models of `FLEET_CHAT_MODEL`, each once. Raises CliError when it names none."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise CliError("FLEET_CHAT_MODEL names no model")
    return found


def scripted_model(settings: UpSettings, source: str, group: str = "") -> ServedModel:
    """A model for scripted engines: a name is all there is, and what the settings say of it.

    Raises CliError for a folder that is not there.
    """
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise CliError(f"the model {source} is no folder")
    name = shown_name(source)
    if source == settings.embedding_source:
        return embedding_model(name, "", group)
    if settings.image_model and source == settings.image_model:
        # Tests run the real engine of one stage among scripted ones.
        folder = Path(source).expanduser()
        return drawing_model(settings, name, str(folder.resolve()) if draws(folder) else "", group)
    if name == served_name(settings.transcribe_model):
        return hearing_model(settings, name, "", group)
    if name == served_name(settings.speech_model):
        return speaking_model(settings, name, "", group)
    return chat_model(settings, name, "", takes_pictures=True, group=group)


def named_model(settings: UpSettings, source: str, prepared: Path | None, group: str = "") -> ServedModel:
    """A model by what the user calls it.

    Args:
        prepared: folder of a local model that was prepared, None when `source` is a folder or a Hugging Face id.
    Raises:
        CliError: it is nothing of the three.
    """
    folder = prepared or Path(source).expanduser()
    if folder.is_dir():
        shown = source if prepared else folder.resolve().name
        path = str(folder.resolve())
        if draws(folder):
            return drawing_model(settings, shown, path, group)
        if hears(folder):
            return hearing_model(settings, shown, path, group)
        if speaks(folder):
            return speaking_model(settings, shown, path, group)
        if makes_embeddings(folder):
            return embedding_model(shown, path, group)
        config = _config(folder)
        sees, hears_too = "vision_config" in config, "audio_config" in config
        return chat_model(settings, shown, path, takes_pictures=sees, takes_audio=hears_too, group=group)
    if _HUB_ID.match(source) and source == settings.image_model:
        return drawing_model(settings, source, source, group)
    if _HUB_ID.match(source) and (source == settings.transcribe_model or _HEARING_ID in source.lower()):
        return hearing_model(settings, source, source, group)
    if _HUB_ID.match(source) and source == settings.embedding_source:
        return embedding_model(source, source, group)
    if _HUB_ID.match(source):
        return chat_model(settings, source, source, takes_pictures=True, group=group)
    known = ", ".join(sorted(PREPARE))
    raise CliError(f"the model {source} is no folder, no Hugging Face id and none of: {known}")


def adapted(found: ServedModel, wanted: ModelSpec) -> ServedModel:
    """A model that was found, as somebody wants it: name, replicas, engine arguments, room for adapters.

    Raises:
        CliError: it is wanted at a stage it does not have.
    """
    strange = sorted({*wanted.replicas, *wanted.engine_args} - set(found.replicas))
    if strange:
        known = ", ".join(found.replicas)
        raise CliError(f"{wanted.model} has no stage {strange[0]}: it has {known}")
    engine_args: dict[Stage, Mapping[str, Any]] = {**found.engine_args, **wanted.engine_args}
    max_rank = 0
    if wanted.takes_adapters:
        own = {**_ADAPTER_ARGS, **engine_args.get(Stage.DECODE, {})}
        engine_args[Stage.DECODE] = own
        max_rank = int(own["max_lora_rank"]) if own["enable_lora"] else 0
    return dataclasses.replace(
        found,
        name=wanted.model,
        replicas={**found.replicas, **wanted.replicas},
        engine_args=engine_args,
        max_adapter_rank=max_rank,
    )


def draws(folder: Path) -> bool:
    """Whether a folder holds a pipeline of diffusers."""
    return (folder / "model_index.json").is_file()


def hears(folder: Path) -> bool:
    """Whether a folder holds a Whisper model of CTranslate2."""
    return (folder / "model.bin").is_file() and any(folder.glob("vocabulary.*"))


def speaks(folder: Path) -> bool:
    """Whether a folder holds voices, and nothing that would be another model."""
    return any(folder.glob("*.onnx")) and not (folder / "config.json").exists()


def _config(folder: Path) -> Mapping[str, Any]:
    """`config.json` of the model in a folder. Raises CliError when the folder holds no model."""
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    except (FileNotFoundError, ValueError) as err:
        raise CliError(f"{folder} holds no model: config.json is missing or unreadable") from err
    return config
