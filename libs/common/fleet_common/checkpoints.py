"""Model folders in Hugging Face layout: where they are, what their small files say, what identifies their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = 32
_IDENTITY_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


def locate_checkpoint(name_or_path: str, patterns: Sequence[str]) -> Path:
    """Folder of a model: a local one as it is, else the cached snapshot of a Hugging Face id.

    Args:
        patterns: file name patterns to fetch for an id; a local folder is not looked into.
    Raises:
        FileNotFoundError: neither a folder nor something that looks like an id.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        return folder
    if not name_or_path or folder.is_absolute() or name_or_path.count("/") > 1:
        raise FileNotFoundError(f"no model folder at {name_or_path!r}")
    from huggingface_hub import snapshot_download  # only reached for ids; local folders need no hub client

    return Path(snapshot_download(name_or_path, allow_patterns=list(patterns)))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder; {} when there is no such file."""
    path = folder / name
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def image_processor_config(folder: Path) -> dict[str, Any]:
    """Settings of the model's image processor, wherever this layout keeps them; {} when it has none."""
    return _processor_part(folder, "image_processor")


def feature_extractor_config(folder: Path) -> dict[str, Any]:
    """The same of the feature extractor of a model that hears."""
    return _processor_part(folder, "feature_extractor")


def _processor_part(folder: Path, part: str) -> dict[str, Any]:
    own = read_json(folder, "preprocessor_config.json")
    if own:
        return own
    nested = read_json(folder, "processor_config.json").get(part, {})
    return nested if isinstance(nested, dict) else {}


def makes_embeddings(folder: Path) -> bool:
    """Whether a model makes vectors, not text: a sentence-transformers folder, or a bare encoder (`BertModel`)."""
    if (folder / "modules.json").is_file():
        return True
    config = read_json(folder, "config.json")
    architectures = [str(name) for name in config.get("architectures") or ()]
    return bool(architectures) and all(name.endswith(("Model", "ForMaskedLM")) for name in architectures)


def max_input_tokens(folder: Path) -> int:
    """Longest input an embedding model was made for, special tokens included; 0 when its files do not say.

    The config counts positions, of which some families (RoBERTa) reserve two, and sentence-transformers' own file names
    what the model was trained with: the smallest counts.
    """
    limits = (
        read_json(folder, "config.json").get("max_position_embeddings"),
        read_json(folder, "sentence_bert_config.json").get("max_seq_length"),
        read_json(folder, "tokenizer_config.json").get("model_max_length"),
    )
    # transformers writes 1e30 for "no limit".
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 1e9]
    return min(known, default=0)


def checkpoint_revision(folder: Path) -> str:
    """32 hex digits that change when the weights or the way images are read change.

    Weights enter by file name, size and samples spread over each file (its head, and so the safetensors header,
    included): reading gigabytes at every start would cost more than it finds. A snapshot of the hub enters by its
    commit, so that services which need no weights of it say the same.
    """
    digest = hashlib.sha256()
    for name in _IDENTITY_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    if folder.parent.name == "snapshots":
        digest.update(folder.name.encode())
    else:
        for path in sorted(folder.glob("*.safetensors")):
            _add_samples(digest, path)
    return digest.hexdigest()[:32]


def _add_samples(digest: Any, path: Path) -> None:
    size_bytes = path.stat().st_size
    digest.update(f"{path.name}\0{size_bytes}\0".encode())
    step_bytes = max(_SAMPLE_BYTES, size_bytes // _NUM_SAMPLES)
    with path.open("rb") as file:
        for offset in range(0, size_bytes, step_bytes):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
