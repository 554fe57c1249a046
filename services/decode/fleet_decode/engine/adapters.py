"""LoRA adapters of one vLLM engine: found by name in a folder, loaded before a request runs with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from fleet_common.errors import InvalidInputError

log = structlog.get_logger(__name__)

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class _Version:
    """What lay in an adapter's folder: another content is another adapter, to vLLM and to its prefix cache."""

    folder: Path
    written_ns: tuple[int, ...]


class Adapters:
    """Which adapters this engine has.

    Args:
        folder: its entries are the adapters, by name; None: there are none.
        max_held: as many as the engine keeps in memory.
    """

    def __init__(self, folder: Path | None, max_held: int) -> None:
        self._folder = folder
        self._max_held = max_held
        self._ids: dict[tuple[str, _Version], int] = {}
        # In the order of their last use, as the engine forgets them.
        self._held: dict[str, None] = {}

    def held(self) -> tuple[str, ...]:
        """Names of those in the engine's memory."""
        return tuple(self._held)

    async def load(self, llm: Any, name: str) -> Any:
        """vLLM's request for an adapter that is in its memory now.

        Asked for before every request: a load that fails in the middle of a step would end the engine for everybody.
        Raises:
            InvalidInputError: there is none of that name, or vLLM cannot use it.
        """
        from vllm.lora.request import LoRARequest

        version = self._version(name)
        number = self._ids.setdefault((name, version), len(self._ids) + 1)
        request = LoRARequest(f"{name}@{number}", number, str(version.folder))
        try:
            await llm.add_lora(request)
        except Exception as err:
            self._held.pop(name, None)
            if llm.errored:
                raise
            log.warning("adapter_not_loaded", adapter=name, error=str(err))
            raise _unusable(name) from err
        self._held.pop(name, None)
        self._held[name] = None
        while len(self._held) > self._max_held:
            del self._held[next(iter(self._held))]
        return request

    def _version(self, name: str) -> _Version:
        if self._folder is None:
            raise InvalidInputError("this model takes no adapters", param="model", code="adapter_unusable")
        try:
            folder = (self._folder / name).resolve(strict=True)
            written_ns = tuple((folder / file).stat().st_mtime_ns for file in _FILES if (folder / file).exists())
        except OSError as err:
            raise _unusable(name) from err
        # A name is one entry of the folder, wherever that leads to.
        if "/" in name or name.startswith(".") or not written_ns:
            raise _unusable(name)
        return _Version(folder, written_ns)


def _unusable(name: str) -> InvalidInputError:
    return InvalidInputError(f"the adapter {name} cannot be loaded", param="model", code="adapter_unusable")
