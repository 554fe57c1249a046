"""Least recently used values under a bound of bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class ByteCache(Generic[V]):
    """Values by key; the longest unused go first. A value above the whole capacity is not kept."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[tuple[str, ...], tuple[V, int]] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all values kept."""
        return self._used_bytes

    def get(self, key: tuple[str, ...]) -> V | None:
        """The value, now the most recently used; None when it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: tuple[str, ...], value: V, nbytes: int) -> None:
        """Keep a value that was not there."""
        if nbytes > self._capacity_bytes or key in self._entries:
            return
        self._entries[key] = (value, nbytes)
        self._used_bytes += nbytes
        while self._used_bytes > self._capacity_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._used_bytes -= freed_bytes
