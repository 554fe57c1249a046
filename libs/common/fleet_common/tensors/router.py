"""All connectors behind one face: chooses by locality and size, spills when the arena is full."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from fleet_common.clock import Clock
from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.tensors.arena import ArenaConnector, ArenaReservation
from fleet_common.tensors.inline import InlineConnector
from fleet_common.tensors.leases import SegmentMissingError
from fleet_common.tensors.port import Array, Connector, Lease, Reservation, StoreStats
from fleet_contracts.tensors import ArenaPlace, InlinePlace, MemoryPlace, NetworkPlace, TensorRef

log = structlog.get_logger(__name__)

#: Asks the owner of an arena tensor to copy it to the network store. None: the owner is gone or holds it no more.
#: Raises StoreError when the owner cannot be asked.
SpillCall = Callable[[TensorRef], Awaitable[TensorRef | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Connectors:
    """What a store is made of.

    Attributes:
        arena: None on hosts without shared memory.
        network: by name; the first takes the writes.
    """

    inline: InlineConnector
    arena: ArenaConnector | None
    network: Mapping[str, Connector]


class FleetTensorStore:
    """The tensor store of one process.

    Args:
        locality: domain within which this process's arena can be read.
        inline_bytes: tensors up to this size travel in the message.
        spill: how to ask a foreign arena's owner; None = a foreign reference is a miss.
    """

    def __init__(
        self, connectors: Connectors, clock: Clock, *, locality: str, inline_bytes: int, spill: SpillCall | None = None
    ) -> None:
        self.locality = locality
        self._inline = connectors.inline
        self._arena = connectors.arena
        self._network = dict(connectors.network)
        self._writer = next(iter(self._network.values()), None)
        self._clock = clock
        self._inline_bytes = inline_bytes
        self._spill_call = spill
        self._spill_total = 0

    @property
    def arena(self) -> ArenaConnector | None:
        """This process's arena; None when it has none."""
        return self._arena

    def is_inline(self, array: Array) -> bool:
        """Whether an array is small enough to travel in the message."""
        return array.nbytes <= self._inline_bytes

    async def put(
        self,
        array: Array,
        *,
        ttl_s: float,
        locality: str | None = None,
        dtype: str | None = None,
        content_hash: str = "",
    ) -> TensorRef:
        if self.is_inline(array):
            return await self._inline.put(array, ttl_s=ttl_s, dtype=dtype, content_hash=content_hash)
        if self._arena is not None and self._is_for_arena(locality):
            try:
                return await self._arena.put(array, ttl_s=ttl_s, dtype=dtype, content_hash=content_hash)
            except StoreError as err:
                if self._writer is None:
                    raise
                self._spill_total += 1
                log.debug("tensor_spilled", nbytes=array.nbytes, reason=err.code)
        if self._writer is None:
            raise StoreError(f"no connector reaches locality {locality!r}")
        return await self._writer.put(array, ttl_s=ttl_s, dtype=dtype, content_hash=content_hash)

    async def get(self, ref: TensorRef) -> Lease:
        try:
            return await self._connector(ref).get(ref)
        except SegmentMissingError as miss:
            copy = await self._ask_owner(ref, miss)
        return await self._connector(copy).get(copy)

    async def release(self, ref: TensorRef) -> None:
        await self._connector(ref).release(ref)

    async def reserve(self, nbytes: int, *, ttl_s: float, part_bytes: Sequence[int] = ()) -> Reservation:
        if self._arena is None:
            raise StoreFullError("there is no arena to reserve in")
        # Small parts travel inline.
        parts = [size_bytes for size_bytes in part_bytes if size_bytes > self._inline_bytes]
        return StoreReservation(self, await self._arena.reserve(nbytes, ttl_s=ttl_s, part_bytes=parts))

    async def spill(self, ref: TensorRef) -> TensorRef | None:
        """Copy one of our arena tensors to the network store, for a reader that cannot map it.

        Returns:
            The copy, with what is left of the life of the original; None when we hold it no more.
        Raises:
            StoreError: the network store is out of reach.
        """
        if self._arena is None or self._writer is None:
            raise StoreError("there is nothing to spill from or to")
        ttl_s = ref.expires_unix_s - self._clock.unix_s()
        try:
            if ttl_s <= 0 or not isinstance(ref.place, ArenaPlace):
                return None
            with await self._arena.get(ref) as lease:
                copy = await self._writer.put(
                    lease.array,
                    ttl_s=ttl_s,
                    dtype=ref.dtype,
                    content_hash=ref.content_hash,
                )
        except (TensorNotFoundError, ContractError):
            return None
        self._spill_total += 1
        return copy

    def sweep(self, now_unix_s: float) -> None:
        """Expire and free; the host calls it about once a second."""
        if self._arena is not None:
            self._arena.sweep(now_unix_s)

    async def reap(self, now_unix_s: float) -> None:
        """Remove what dead processes left on this host; the host calls it every few seconds."""
        if self._arena is not None:
            await self._arena.reap(now_unix_s)

    def stats(self) -> dict[str, StoreStats]:
        stats = {"inline": self._inline.stats()}
        if self._arena is not None:
            stats["arena"] = dataclasses.replace(self._arena.stats(), spill_total=self._spill_total)
        return stats | {name: connector.stats() for name, connector in self._network.items()}

    async def close(self) -> None:
        if self._arena is not None:
            await self._arena.close()
        for connector in self._network.values():
            await connector.close()

    def _is_for_arena(self, locality: str | None) -> bool:
        """An unknown reader is served over the network if there is one: it may be anywhere."""
        return locality == self.locality if locality else self._writer is None

    def _connector(self, ref: TensorRef) -> Connector:
        match ref.place:
            case InlinePlace():
                return self._inline
            case MemoryPlace():
                name = "memory"
            case NetworkPlace(connector=name):
                pass
            case ArenaPlace():
                if self._arena is None:
                    return _NO_ARENA
                return self._arena
        connector = self._network.get(name)
        if connector is None:
            raise StoreError(f"no connector is registered as {name[:40]!r}")
        return connector

    async def _ask_owner(self, ref: TensorRef, miss: SegmentMissingError) -> TensorRef:
        copy = await self._spill_call(ref) if self._spill_call is not None else None
        if copy is None:
            raise miss
        if isinstance(copy.place, ArenaPlace) or (copy.dtype, copy.shape) != (ref.dtype, ref.shape):
            raise ContractError("the owner answered with another tensor")
        return copy


class StoreReservation:
    """Room in the arena. Small tensors travel inline as ever; what exceeds the reservation goes the ordinary way."""

    def __init__(self, store: FleetTensorStore, inner: ArenaReservation) -> None:
        self._store = store
        self._inner = inner

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        store = self._store
        if not store.is_inline(array):
            with contextlib.suppress(StoreFullError):
                return await self._inner.put(array, ttl_s=ttl_s, dtype=dtype, content_hash=content_hash)
        return await store.put(array, ttl_s=ttl_s, locality=store.locality, dtype=dtype, content_hash=content_hash)

    async def cancel(self) -> None:
        await self._inner.cancel()


class _NoArena:
    """Stands in on hosts without an arena: every arena reference is somebody else's."""

    name = "arena"

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        raise StoreFullError("there is no arena")

    async def get(self, ref: TensorRef) -> Lease:
        raise SegmentMissingError(ref, "there is no arena here")

    async def release(self, ref: TensorRef) -> None:
        """Its owner frees it."""

    def stats(self) -> StoreStats:
        return StoreStats(used_bytes=0, capacity_bytes=0, num_tensors=0, num_leases=0)

    async def close(self) -> None:
        """Nothing to close."""


_NO_ARENA = _NoArena()
