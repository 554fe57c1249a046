"""A reader's mappings and leases: one kernel lock per part in use, counted within the process."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from fleet_common.errors import ContractError, TensorNotFoundError
from fleet_common.tensors import layout
from fleet_common.tensors.port import Array
from fleet_common.tensors.segment import Descriptor, MappedSegment, signature
from fleet_common.tensors.spec import spec_of_ref
from fleet_contracts.tensors import ArenaPlace, TensorRef


class SegmentMissingError(TensorNotFoundError):
    """The segment is not on this host (or not in this folder): its owner may still have the tensor."""


class ArenaLease:
    """A view into a mapped segment.

    `close` gives it back at once. A lease that is never closed is given back after the last array over it is gone.
    """

    def __init__(self, table: LeaseTable, key: tuple[str, int], flat: Array, array: Array) -> None:
        self._array = array
        self._finalizer = weakref.finalize(flat, table.abandon, key)
        self._table = table
        self._key = key

    @property
    def array(self) -> Array:
        return self._array

    def close(self) -> None:
        if self._finalizer.detach() is not None:
            self._table.give_back(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaseTable:
    """Opens parts of segments in one folder. Thread-safe: leases may be closed anywhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._segments: dict[str, MappedSegment] = {}
        self._counts: dict[tuple[str, int], int] = {}
        # Finalizers run in any thread, also in one that holds the lock: they only write here.
        self._abandoned: deque[tuple[str, int]] = deque()

    @property
    def num_leases(self) -> int:
        with self._lock:
            self._drain()
            return sum(self._counts.values())

    def open(self, ref: TensorRef, place: ArenaPlace, now_unix_s: float) -> ArenaLease:
        """Lease a part and check that it is what the reference says.

        Raises:
            SegmentMissingError: no such segment here.
            TensorNotFoundError: freed, written again, expired or another tensor.
            ContractError: the reference contradicts itself.
        """
        spec = spec_of_ref(ref)
        key = (place.segment, place.slot)
        with self._lock:
            self._drain()
            segment = self._mapped(ref, place.segment)
            if not 0 <= place.slot < segment.geometry.num_descriptors:
                raise TensorNotFoundError(ref, "no such slot")
            self._take(ref, segment, key)
        # From here on the owner cannot free the part, so what is read below stays true.
        descriptor = segment.descriptor(place.slot, place.generation)
        reason = _mismatch(descriptor, segment, signature(spec), ref.nbytes, now_unix_s)
        if descriptor is None or reason:
            self.give_back(key)
            raise TensorNotFoundError(ref, reason or "freed or written again")
        flat = segment.view(place.slot, descriptor.offset, descriptor.nbytes)
        return ArenaLease(self, key, flat, flat.view(spec.stored).reshape(spec.shape))

    def give_back(self, key: tuple[str, int]) -> None:
        """Close one lease on a part."""
        with self._lock:
            self._drain()
            self._drop(key)

    def abandon(self, key: tuple[str, int]) -> None:
        """As `give_back`, later: safe within a garbage collection."""
        self._abandoned.append(key)

    def sweep(self) -> None:
        """Give abandoned leases back, and forget mappings of vanished segments that nobody reads."""
        with self._lock:
            self._drain()
            in_use = {name for name, _ in self._counts}
            for name in [name for name, segment in self._segments.items() if segment.is_unlinked]:
                if name not in in_use:
                    self._segments.pop(name).close()

    def close(self) -> None:
        """Drop every mapping and lease. Arrays that are left stay readable, no longer protected."""
        with self._lock:
            for name, number in self._counts:
                self._segments[name].unshare(number)
            self._counts.clear()
            self._abandoned.clear()
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()

    def _mapped(self, ref: TensorRef, name: str) -> MappedSegment:
        segment = self._segments.get(name)
        if segment is not None:
            return segment
        if layout.parse_segment_name(name) is None:
            raise ContractError("not a segment name")
        try:
            segment = MappedSegment.open(self._folder, name)
        except OSError as err:
            raise SegmentMissingError(ref, f"segment cannot be opened: {err.strerror}") from err
        except ValueError as err:
            raise TensorNotFoundError(ref, str(err)) from err
        self._segments[name] = segment
        return segment

    def _take(self, ref: TensorRef, segment: MappedSegment, key: tuple[str, int]) -> None:
        count = self._counts.get(key, 0)
        if count == 0 and not segment.share(key[1]):
            raise TensorNotFoundError(ref, "being freed")
        self._counts[key] = count + 1

    def _drain(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.popleft())

    def _drop(self, key: tuple[str, int]) -> None:
        count = self._counts.get(key)
        if count is None:  # the table was closed meanwhile
            return
        if count > 1:
            self._counts[key] = count - 1
            return
        del self._counts[key]
        self._segments[key[0]].unshare(key[1])


def _mismatch(
    descriptor: Descriptor | None, segment: MappedSegment, wanted_signature: int, nbytes: int, now_unix_s: float
) -> str:
    """Why the part is not what the reference names; "" when it is."""
    if descriptor is None:
        return "freed or written again"
    if descriptor.nbytes != nbytes or descriptor.signature != wanted_signature:
        return "the slot holds another tensor"
    if descriptor.expires_unix_s <= now_unix_s:
        return "expired"
    if descriptor.offset + nbytes > segment.geometry.slot_bytes:
        return "descriptor points outside its slot"
    return ""
