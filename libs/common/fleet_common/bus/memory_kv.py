"""Buckets of the memory bus: compare-and-set, TTL, mirrors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fleet_common.bus.port import KvEntry, KvMirror, checked_key
from fleet_common.errors import BusError, RevisionConflictError

OnChange = Callable[[str, bytes | None], None]


@dataclass(frozen=True, slots=True)
class _Value:
    entry: KvEntry
    expires_s: float | None


class MemoryKv:
    """One bucket, shared by every bus of the broker."""

    def __init__(self, now_s: Callable[[], float], alarm: Callable[[float], None], ttl_s: float | None = None) -> None:
        self.is_up = True
        self.now_s = now_s
        self._alarm = alarm
        self._ttl_s = ttl_s
        self._values: dict[str, _Value] = {}
        self._revision = 0
        self._mirrors: list[MemoryMirror] = []

    async def get(self, key: str) -> KvEntry | None:
        self._check_up()
        value = self._values.get(checked_key(key))
        return value.entry if value else None

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        self._check_up()
        checked_key(key)
        self._revision += 1
        lifetime_s = ttl_s if ttl_s is not None else self._ttl_s
        expires_s = None if lifetime_s is None else self.now_s() + lifetime_s
        self._values[key] = _Value(KvEntry(value, self._revision), expires_s)
        if lifetime_s is not None:
            self._alarm(lifetime_s)
        self._tell(key, value)
        return self._revision

    async def create(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        return await self.update(key, value, 0, ttl_s)

    async def update(self, key: str, value: bytes, revision: int, ttl_s: float | None = None) -> int:
        self._check_up()
        current = self._values.get(key)
        found = current.entry.revision if current else 0
        if found != revision:
            raise RevisionConflictError(f"{key} is at revision {found}, not {revision}")
        return await self.put(key, value, ttl_s)

    async def delete(self, key: str) -> None:
        self._check_up()
        self._drop(key)

    async def entries(self, prefix: str) -> dict[str, KvEntry]:
        self._check_up()
        found = {key: value.entry for key, value in self._values.items() if key.startswith(f"{checked_key(prefix)}.")}
        return dict(sorted(found.items(), key=lambda item: item[1].revision))

    async def purge(self, prefix: str) -> None:
        self._check_up()
        for key in [key for key in self._values if key.startswith(f"{checked_key(prefix)}.")]:
            self._drop(key)

    async def mirror(self, on_change: OnChange | None = None) -> KvMirror:
        self._check_up()
        mirror = MemoryMirror(self, on_change)
        mirror.read_again()
        self._mirrors.append(mirror)
        return mirror

    def contents(self) -> dict[str, bytes]:
        """Keys and values as they are now."""
        return {key: value.entry.value for key, value in self._values.items()}

    def tick(self) -> None:
        """Drop what has expired."""
        now_s = self.now_s()
        for key, value in list(self._values.items()):
            if value.expires_s is not None and value.expires_s <= now_s:
                self._drop(key)

    def set_up(self, is_up: bool) -> None:
        """Broker up or down; mirrors read the whole bucket again when it comes back."""
        self.is_up = is_up
        if is_up:
            for mirror in self._mirrors:
                mirror.read_again()

    def forget(self, mirror: MemoryMirror) -> None:
        """The mirror follows no longer."""
        if mirror in self._mirrors:
            self._mirrors.remove(mirror)

    def _drop(self, key: str) -> None:
        if self._values.pop(key, None) is not None:
            self._tell(key, None)

    def _tell(self, key: str, value: bytes | None) -> None:
        if self.is_up:
            for mirror in self._mirrors:
                asyncio.get_running_loop().call_soon(mirror.apply, key, value)

    def _check_up(self) -> None:
        if not self.is_up:
            raise BusError("the memory broker is down")


class MemoryMirror:
    """A copy of a bucket."""

    def __init__(self, kv: MemoryKv, on_change: OnChange | None) -> None:
        self._kv = kv
        self._on_change = on_change
        self._copy: dict[str, bytes] = {}
        self._synced_s = 0.0

    def get(self, key: str) -> bytes | None:
        return self._copy.get(key)

    def items(self) -> Mapping[str, bytes]:
        return MappingProxyType(self._copy)

    @property
    def synced_monotonic_s(self) -> float:
        return self._kv.now_s() if self._kv.is_up else self._synced_s

    async def stop(self) -> None:
        self._on_change = None
        self._kv.forget(self)

    def read_again(self) -> None:
        """Take the bucket as it is and tell the differences."""
        whole = self._kv.contents()
        self._synced_s = self._kv.now_s()
        for key in [key for key in self._copy if key not in whole]:
            self.apply(key, None)
        for key, value in whole.items():
            self.apply(key, value)

    def apply(self, key: str, value: bytes | None) -> None:
        """Take over one change, if it is one."""
        if self._copy.get(key) == value:
            return
        if value is None:
            self._copy.pop(key, None)
        else:
            self._copy[key] = value
        if self._on_change is not None:
            self._on_change(key, value)
