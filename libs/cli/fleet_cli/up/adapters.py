"""LoRA adapters of a model as its decode workers find them: a folder with a link per name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fleet_contracts.models import AdapterSpec

_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,119}$")
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def is_name(name: str) -> bool:
    """Whether an adapter can be called so: its name is also a file's."""
    return bool(_NAME.match(name))


def problem(path: Path, max_rank: int) -> str:
    """Why the adapter in a folder cannot be used; "" when it can.

    Args:
        max_rank: of the engine; 0: its model takes no adapters.
    """
    if max_rank == 0:
        return "the model was not served with room for adapters: unserve it, then serve it with --lora"
    try:
        config = json.loads((path / "adapter_config.json").read_text())
        rank = int(config["r"])
    except FileNotFoundError:
        return "its folder holds no adapter_config.json"
    except (OSError, ValueError, KeyError, TypeError):
        return "its adapter_config.json names no rank"
    if not any((path / name).is_file() for name in _WEIGHTS):
        return "its folder holds no weights"
    if rank > max_rank:
        return f"its rank {rank} is above the engine's max_lora_rank {max_rank}"
    return ""


def make_folder(folder: Path) -> None:
    """A new, empty one."""
    remove_folder(folder)
    folder.mkdir(parents=True)


def remove_folder(folder: Path) -> None:
    """Links only: what they lead to stays."""
    shutil.rmtree(folder, ignore_errors=True)


def set_links(folder: Path, wanted: Sequence[AdapterSpec], max_rank: int) -> dict[str, str]:
    """Make the folder hold a link per adapter that can be used. Returns name -> why not, for the others."""
    errors = {adapter.name: problem(Path(adapter.path), max_rank) for adapter in wanted}
    usable = {adapter.name: Path(adapter.path) for adapter in wanted if not errors[adapter.name]}
    for link in folder.iterdir():
        if link.name not in usable:
            link.unlink()
    for name, path in usable.items():
        fresh = folder / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path)
        fresh.replace(folder / name)
    return {name: why for name, why in errors.items() if why}
