"""What the fleet needs of a tensor store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_contracts.tensors import TensorRef

#: numpy has no bfloat16: such tensors are uint16 arrays whose ref says `bfloat16`.
Array = NDArray[np.generic]


class Lease(Protocol):
    """A read-only view of a tensor. The bytes stay valid until `close` (or `kill -9` of this process)."""

    @property
    def array(self) -> Array:
        """Zero-copy where the connector allows it; never writable; shape and dtype of the ref (bfloat16 as uint16)."""

    def close(self) -> None:
        """Give the view back. Idempotent; using `array` afterwards is a bug."""

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds right now.

    Attributes:
        used_bytes, capacity_bytes: tensors put by this process and not freed yet, and the limit (0 = the server's).
        num_tensors: the same as a count.
        num_leases: views open in this process.
        put_total, get_total, miss_total, full_total, spill_total: since the start of the process.
    """

    used_bytes: int
    capacity_bytes: int
    num_tensors: int
    num_leases: int
    put_total: int = 0
    get_total: int = 0
    miss_total: int = 0
    full_total: int = 0
    spill_total: int = 0


class Connector(Protocol):
    """One place to keep tensors. Write-once: a ref never changes its bytes."""

    name: str

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        """Copy a C-contiguous array in. `dtype` names what numpy cannot (`bfloat16`).

        Raises:
            StoreFullError: no room; nothing was written.
            StoreError: out of reach.
        """

    async def get(self, ref: TensorRef) -> Lease:
        """Open a view.

        Raises:
            TensorNotFoundError: evicted, expired, torn, flushed or of another boot.
            StoreError: out of reach.
        """

    async def release(self, ref: TensorRef) -> None:
        """The tensor is needed no more: free it unless a reader still holds it. Unknown refs are fine."""

    def stats(self) -> StoreStats: ...

    async def close(self) -> None: ...


class TensorStore(Protocol):
    """The connectors behind one face: chooses by locality and size."""

    async def put(
        self,
        array: Array,
        *,
        ttl_s: float,
        locality: str | None = None,
        dtype: str | None = None,
        content_hash: str = "",
    ) -> TensorRef:
        """Keep an array where a reader of `locality` can reach it.

        Inline below `shm_threshold_bytes`; the arena when `locality` is this process's own and it has room; else the
        network connector. None = unknown reader: the network connector if there is one.
        Raises StoreFullError when nothing has room, StoreError when nothing is in reach.
        """

    async def get(self, ref: TensorRef) -> Lease:
        """Open a view, wherever the bytes are; asks a foreign arena's owner to spill. Raises as Connector.get."""

    async def release(self, ref: TensorRef) -> None: ...

    async def reserve(self, nbytes: int, *, ttl_s: float, part_bytes: Sequence[int] = ()) -> Reservation:
        """Set bytes for all parts (up to 16) of one request aside before the first is encoded.

        `part_bytes` are the sizes of the parts where they are known: it saves room.
        Raises StoreFullError at once when the arena cannot hold them (the parts will spill instead).
        """

    def stats(self) -> dict[str, StoreStats]:
        """Per connector name."""

    async def close(self) -> None: ...


class Reservation(Protocol):
    """Room in the arena that only its holder may fill, part by part."""

    async def put(
        self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = ""
    ) -> TensorRef: ...

    async def cancel(self) -> None:
        """Give back what was not used. Idempotent."""
