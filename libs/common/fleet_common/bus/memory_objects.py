"""Objects of the memory bus."""

from __future__ import annotations

from collections.abc import Callable

from fleet_common.errors import BusError


class MemoryObjects:
    """One bucket of objects, shared by every bus of the broker."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.is_up = True
        self._now_s = now_s
        self._objects: dict[str, tuple[bytes, float | None]] = {}

    async def put(self, name: str, data: bytes, ttl_s: float | None = None) -> None:
        self._check_up()
        self._objects[name] = (bytes(data), None if ttl_s is None else self._now_s() + ttl_s)

    async def get(self, name: str) -> bytes | None:
        self._check_up()
        data, expires_s = self._objects.get(name, (None, None))
        return None if expires_s is not None and expires_s <= self._now_s() else data

    async def delete(self, name: str) -> None:
        self._check_up()
        self._objects.pop(name, None)

    @property
    def names(self) -> list[str]:
        """Of everything stored."""
        return list(self._objects)

    def _check_up(self) -> None:
        if not self.is_up:
            raise BusError("the memory broker is down")
