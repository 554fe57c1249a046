"""Tensors small enough to travel in the message itself."""

from __future__ import annotations

from fleet_common.clock import Clock
from fleet_common.errors import ContractError, TensorNotFoundError
from fleet_common.tensors.held import Counters
from fleet_common.tensors.port import Array, Lease, StoreStats
from fleet_common.tensors.spec import native, spec_of_array, spec_of_ref, view_of
from fleet_contracts.tensors import InlinePlace, TensorRef


class InlineConnector:
    """Bytes in the reference: nothing to free, nothing to lose."""

    name = "inline"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counters = Counters()

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        spec = spec_of_array(array, dtype)
        self._counters.put_total += 1
        return TensorRef(
            place=InlinePlace(data=native(array, spec).tobytes()),
            dtype=spec.dtype,
            shape=spec.shape,
            nbytes=spec.nbytes,
            content_hash=content_hash,
            expires_unix_s=self._clock.unix_s() + ttl_s,
        )

    async def get(self, ref: TensorRef) -> Lease:
        spec = spec_of_ref(ref)
        if not isinstance(ref.place, InlinePlace):
            raise ContractError("not an inline reference")
        if len(ref.place.data) != spec.nbytes:
            self._counters.miss_total += 1
            raise TensorNotFoundError(ref, "inline bytes are cut short")
        return self._counters.lease(view_of(ref.place.data, spec))

    async def release(self, ref: TensorRef) -> None:
        """Nothing to free."""

    def stats(self) -> StoreStats:
        counters = self._counters
        return StoreStats(
            used_bytes=0,
            capacity_bytes=0,
            num_tensors=0,
            num_leases=counters.num_leases,
            put_total=counters.put_total,
            get_total=counters.get_total,
            miss_total=counters.miss_total,
        )

    async def close(self) -> None:
        """Nothing to close."""
