"""The in-process store: unit tests, and fleets of one process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from fleet_common.clock import Clock
from fleet_common.errors import ContractError, StoreFullError, TensorNotFoundError
from fleet_common.tensors.held import Counters
from fleet_common.tensors.port import Array, Lease, StoreStats
from fleet_common.tensors.spec import native, spec_of_array, spec_of_ref, view_of
from fleet_contracts.tensors import MemoryPlace, TensorRef


@dataclass(frozen=True, slots=True)
class _Entry:
    blob: bytes
    expires_unix_s: float
    layout: tuple[str, tuple[int, ...]]


class MemoryConnector:
    """A dict of bytes with expiry.

    Args:
        capacity_bytes: a put beyond it raises StoreFullError; 0 = no limit.
    """

    name = "memory"

    def __init__(self, clock: Clock, capacity_bytes: int = 0) -> None:
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._entries: dict[str, _Entry] = {}
        self._used_bytes = 0
        self._counters = Counters()

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        spec = spec_of_array(array, dtype)
        self.sweep(self._clock.unix_s())
        if self._capacity_bytes and self._used_bytes + spec.nbytes > self._capacity_bytes:
            self._counters.full_total += 1
            raise StoreFullError(f"{spec.nbytes} bytes do not fit")
        key = secrets.token_hex(16)
        expires_unix_s = self._clock.unix_s() + ttl_s
        self._entries[key] = _Entry(native(array, spec).tobytes(), expires_unix_s, (spec.dtype, spec.shape))
        self._used_bytes += spec.nbytes
        self._counters.put_total += 1
        return TensorRef(
            place=MemoryPlace(key=key),
            dtype=spec.dtype,
            shape=spec.shape,
            nbytes=spec.nbytes,
            content_hash=content_hash,
            expires_unix_s=expires_unix_s,
        )

    async def get(self, ref: TensorRef) -> Lease:
        spec = spec_of_ref(ref)
        if not isinstance(ref.place, MemoryPlace):
            raise ContractError("not a memory reference")
        entry = self._entries.get(ref.place.key)
        if entry is None or entry.expires_unix_s <= self._clock.unix_s():
            self._counters.miss_total += 1
            raise TensorNotFoundError(ref, "unknown or expired key")
        if entry.layout != (spec.dtype, spec.shape):
            self._counters.miss_total += 1
            raise TensorNotFoundError(ref, "the key holds another tensor")
        return self._counters.lease(view_of(entry.blob, spec))

    async def release(self, ref: TensorRef) -> None:
        if isinstance(ref.place, MemoryPlace):
            self._drop(ref.place.key)

    def sweep(self, now_unix_s: float) -> None:
        """Forget what has expired."""
        for key in [key for key, entry in self._entries.items() if entry.expires_unix_s <= now_unix_s]:
            self._drop(key)

    def clear(self) -> None:
        """Lose everything, as a flushed server would."""
        for key in list(self._entries):
            self._drop(key)

    def stats(self) -> StoreStats:
        counters = self._counters
        return StoreStats(
            used_bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes,
            num_tensors=len(self._entries),
            num_leases=counters.num_leases,
            put_total=counters.put_total,
            get_total=counters.get_total,
            miss_total=counters.miss_total,
            full_total=counters.full_total,
        )

    async def close(self) -> None:
        self.clear()

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= len(entry.blob)
