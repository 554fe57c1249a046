"""Reads the tensors of one part of a checkpoint, and no others: the language model's stay on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fleet_common.checkpoints import read_json


def load_part(module: Any, folder: Path, part: str) -> None:
    """Fill a torch module from the tensors of `part` (`vision_tower`, `multi_modal_projector`).

    Names may carry the prefixes of any transformers release (`model.`, `vision_model.`).
    Raises:
        ValueError: a tensor of the module is missing in the checkpoint, or has another shape.
    """
    wanted = module.state_dict()
    found: dict[str, Any] = {}
    for path, names in _names_by_file(folder).items():
        matched = {name: own for name in names if (own := _own_name(name, part, wanted)) is not None}
        if not matched:
            continue
        with safe_open(path, framework="pt") as tensors:
            for name, own in matched.items():
                found[own] = tensors.get_tensor(name).to(wanted[own].dtype)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} tensors of {part}, like {missing[0]}")
    wrong = sorted(name for name, tensor in found.items() if tensor.shape != wanted[name].shape)
    if wrong:
        raise ValueError(f"{part}: {wrong[0]} has another shape than config.json says")
    module.load_state_dict(found)


def _names_by_file(folder: Path) -> dict[Path, list[str]]:
    index = read_json(folder, "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        by_file: dict[Path, list[str]] = {}
        for name, file_name in index.items():
            by_file.setdefault(folder / file_name, []).append(name)
        return by_file
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no safetensors file in {folder.name}")
    return {path: _names_in(path) for path in paths}


def _names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as tensors:
        return list(tensors.keys())


def _own_name(name: str, part: str, wanted: Mapping[str, Any]) -> str | None:
    """The module's name of a tensor of the checkpoint, None when it belongs elsewhere or is not used."""
    head, dot, rest = name.removeprefix("model.").partition(".")
    if head != part or not dot:
        return None
    for candidate in (rest, rest.removeprefix("vision_model."), f"vision_model.{rest}"):
        if candidate in wanted:
            return candidate
    return None
