"""A lease for bytes that this process holds anyway (inline, memory, fetched from the network)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from fleet_common.tensors.port import Array


class HeldLease:
    """A view whose bytes belong to Python: closing only counts."""

    def __init__(self, array: Array, on_close: Callable[[], None]) -> None:
        self._array = array
        self._on_close: Callable[[], None] | None = on_close

    @property
    def array(self) -> Array:
        return self._array

    def close(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Counters:
    """Running totals of a connector, as in `StoreStats`."""

    def __init__(self) -> None:
        self.put_total = 0
        self.get_total = 0
        self.miss_total = 0
        self.full_total = 0
        self.num_leases = 0

    def lease(self, array: Array) -> HeldLease:
        """Open a counted lease over bytes that Python keeps alive."""
        self.get_total += 1
        self.num_leases += 1
        return HeldLease(array, self._closed)

    def _closed(self) -> None:
        self.num_leases -= 1
