"""What the files of a model folder say, apart from weights and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_common.checkpoints import feature_extractor_config, image_processor_config, read_json
from fleet_preprocess.core.audio_families import AudioFamily, audio_family
from fleet_preprocess.core.families import ImageFamily, ModelFiles, image_family

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "image_token",
    "audio_token",
)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """How a model takes images.

    Attributes:
        token_id: marks an image's place.
    """

    token_id: int
    family: ImageFamily


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """How a model takes recordings.

    Attributes:
        token_id: marks a recording's place.
    """

    token_id: int
    family: AudioFamily


def read_chat_template(folder: Path) -> str:
    """Source of the chat template; "" when the model has none (completions still work).

    Processor files outrank the tokenizer's, as in transformers; of several named templates `default` is taken.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        template = read_json(folder, name).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, dict):
            template = template.get("default")
        if isinstance(template, str):
            return template
    return ""


def read_named_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and its like, as chat templates want them."""
    named: dict[str, str] = {}
    for source in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(folder, source)
        for name in _TOKEN_NAMES:
            value = config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str) and content:
                named[name] = content
    return named


def read_context_tokens(config: Mapping[str, Any]) -> int:
    """Longest sequence of the language model; 0 when its config does not say."""
    text = config.get("text_config") or config
    return int(text.get("max_position_embeddings", 0))


def read_image_facts(folder: Path, config: Mapping[str, Any]) -> ImageFacts | None:
    """How the model takes images; None for a text-only model.

    Raises:
        ValueError: a family, tower or image size this code does not know.
    """
    if config.get("vision_config") is None:
        return None
    family = image_family(ModelFiles(config, image_processor_config(folder)))
    return ImageFacts(token_id=_media_token_id(config, "image"), family=family)


def read_audio_facts(folder: Path, config: Mapping[str, Any]) -> AudioFacts | None:
    """How the model takes recordings; None for one that takes none.

    Raises:
        ValueError: a family, tower or feature extractor this code does not know.
    """
    if config.get("audio_config") is None:
        return None
    family = audio_family(ModelFiles(config, feature_extractor_config(folder)))
    return AudioFacts(token_id=_media_token_id(config, "audio"), family=family)


def _media_token_id(config: Mapping[str, Any], kind: str) -> int:
    token_id = config.get(f"{kind}_token_index", config.get(f"{kind}_token_id"))
    if token_id is None:
        raise ValueError(f"config.json names no {kind} token")
    return int(token_id)
