"""The shared-memory arena: tensors of one host, written once by their producer, read without a copy by everybody.

See `layout` for the file, `locks` for leases, ARCHITECTURE.md for the picture. A full arena refuses, it never waits
and never overwrites.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from fleet_common.clock import Clock
from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.tensors import layout, segment
from fleet_common.tensors.leases import LeaseTable, SegmentMissingError
from fleet_common.tensors.pool import Slot, SlotPool
from fleet_common.tensors.port import Array, Lease, StoreStats
from fleet_common.tensors.reaper import ReapReport, reap
from fleet_common.tensors.segment import Descriptor, OwnedSegment
from fleet_common.tensors.spec import TensorSpec, spec_of_array
from fleet_contracts.tensors import ArenaPlace, TensorRef

log = structlog.get_logger(__name__)

#: Copies above this leave the event loop: a thread costs about 0.1 ms, 8 MB hold the loop for about 1 ms.
_LOOP_COPY_BYTES = 8 << 20


def read_boot_id() -> str:
    """Identifies this boot of this host; containers on it share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def owner_token(owner: str) -> str:
    """16 hex characters that stand for a process in segment names and spill subjects.

    A name that outlives the process (a worker id) lets the next run sweep what the last one left; "" = random.
    """
    return hashlib.sha256(owner.encode()).hexdigest()[:16] if owner else secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class ArenaConfig:
    """Where and how large.

    Attributes:
        owner: see `owner_token`.
        quota_bytes: limit on the segments this process makes.
        grace_s: how long tensors of a dead owner are kept.
    """

    folder: Path
    namespace: str
    owner: str
    boot_id: str
    quota_bytes: int
    grace_s: float


@dataclass(slots=True)
class _Held:
    """A tensor this process put and has not freed."""

    slot: Slot
    number: int
    generation: int
    nbytes: int
    expires_unix_s: float
    is_released: bool = False


class ArenaConnector:
    """Producer and reader of one process. Not thread-safe: belongs to one event loop; leases may go anywhere."""

    name = "arena"

    def __init__(self, config: ArenaConfig, clock: Clock) -> None:
        """ValueError for a namespace that cannot be part of a file name."""
        layout.check_namespace(config.namespace)
        self.config = config
        self._clock = clock
        self._pool = SlotPool(config.quota_bytes)
        self._held: dict[tuple[str, int], _Held] = {}
        self._reservations: set[ArenaReservation] = set()
        self._leases = LeaseTable(config.folder)
        # Own threads: the default executor may be full of model work.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="arena")
        self._growing = asyncio.Lock()
        self._is_closed = False
        self._put_total = self._get_total = self._miss_total = self._full_total = 0

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        spec = spec_of_array(array, dtype)
        slot = await self._take(spec.nbytes)
        return await self._fill(slot, array, spec, ttl_s, content_hash)

    async def get(self, ref: TensorRef) -> Lease:
        place = ref.place
        if not isinstance(place, ArenaPlace):
            raise ContractError("not an arena reference")
        if place.boot_id != self.config.boot_id:
            self._miss_total += 1
            raise SegmentMissingError(ref, "another host's or another boot's")
        try:
            lease = self._leases.open(ref, place, self._clock.unix_s())
        except TensorNotFoundError:
            self._miss_total += 1
            raise
        self._get_total += 1
        return lease

    async def release(self, ref: TensorRef) -> None:
        """Free one of our own tensors, or tell the owner on this host that it may."""
        place = ref.place
        if not isinstance(place, ArenaPlace) or place.boot_id != self.config.boot_id:
            return
        held = self._held.get((place.segment, place.slot))
        if held is not None:
            if held.generation == place.generation:
                self._free(held)
        elif place.segment not in self._pool.segments and layout.parse_segment_name(place.segment) is not None:
            segment.mark_released(self.config.folder, place.segment, place.slot, place.generation)

    async def reserve(self, nbytes: int, *, ttl_s: float, part_bytes: Sequence[int] = ()) -> ArenaReservation:
        """Set slots aside for up to 16 tensors of together `nbytes`.

        Args:
            part_bytes: sizes of the tensors, where they are known: each gets a slot of its own, which often takes
                less room than one slot for all.
        Raises:
            StoreFullError: no room for that much; nothing is held.
        """
        # In a slot for all, each tensor starts on a page of its own.
        slack_bytes = (layout.PARTS_PER_SLOT - 1) * layout.PAGE_BYTES if nbytes else 0
        reservation = ArenaReservation(self, nbytes, self._clock.unix_s() + ttl_s)
        self._reservations.add(reservation)
        try:
            for slot_bytes in part_bytes or (nbytes + slack_bytes,):
                slot = await self._take(slot_bytes)
                slot.is_reserved = True
                reservation.slots.append(slot)
        except BaseException:
            self._end_reservation(reservation)
            raise
        return reservation

    def owns(self, ref: TensorRef) -> bool:
        """Whether this process put that tensor and still holds it."""
        place = ref.place
        return isinstance(place, ArenaPlace) and place.segment in self._pool.segments

    def sweep(self, now_unix_s: float) -> None:
        """Expire, retry what readers held, take in what readers released, show life. Cheap; about once a second."""
        self._leases.sweep()
        for reservation in [one for one in self._reservations if one.expires_unix_s <= now_unix_s]:
            self._end_reservation(reservation)
        self._collect(now_unix_s)
        for owned in list(self._pool.segments.values()):
            if owned.is_unlinked:
                self._lose(owned)
            else:
                owned.touch()

    async def reap(self, now_unix_s: float, *, own: bool = False) -> ReapReport:
        """Remove what dead processes left in this namespace; `own`: all that our predecessor of the same name left."""
        config = self.config
        owner, grace_s = (config.owner, 0.0) if own else (None, config.grace_s)
        report = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: reap(config.folder, config.namespace, grace_s, now_unix_s, owner=owner)
        )
        if report.segments:
            log.info("segments_reaped", num_segments=len(report.segments), freed_bytes=report.freed_bytes)
        return report

    def stats(self) -> StoreStats:
        return StoreStats(
            used_bytes=sum(held.nbytes for held in self._held.values()),
            capacity_bytes=self.config.quota_bytes,
            num_tensors=len(self._held),
            num_leases=self._leases.num_leases,
            put_total=self._put_total,
            get_total=self._get_total,
            miss_total=self._miss_total,
            full_total=self._full_total,
        )

    async def close(self) -> None:
        """Unlink our segments. What others have open stays readable for them; the rest is gone."""
        async with self._growing:
            self._leases.close()
            self._held.clear()
            self._reservations.clear()
            for owned in list(self._pool.segments.values()):
                self._pool.retire(owned)
            self._pool.quota_bytes = 0
            self._is_closed = True
        self._threads.shutdown(wait=False)

    async def _take(self, nbytes: int) -> Slot:
        """A slot for `nbytes`. Raises StoreFullError."""
        slot_bytes = layout.slot_bytes_for(nbytes)
        slot = self._take_free(slot_bytes)
        if slot is not None:
            return slot
        async with self._growing:
            slot = self._take_free(slot_bytes)
            if slot is None:
                self._collect(self._clock.unix_s())
                slot = self._pool.take(slot_bytes) or await self._grow(slot_bytes) or self._pool.take_larger(slot_bytes)
        if slot is None:
            self._full_total += 1
            raise StoreFullError(f"the arena has no room for {nbytes} bytes")
        return slot

    def _take_free(self, slot_bytes: int) -> Slot | None:
        """A free slot that readers can reach: segments whose file somebody removed are given up on the way."""
        while (slot := self._pool.take(slot_bytes)) is not None:
            if not slot.segment.is_unlinked:
                return slot
            self._lose(slot.segment)
        return None

    def _lose(self, lost: OwnedSegment) -> None:
        """The file is gone, and every tensor in it: forget them, or all that is put there later would be missing."""
        log.warning("segment_removed_by_somebody", segment=lost.name)
        self._held = {key: held for key, held in self._held.items() if held.slot.segment is not lost}
        self._pool.retire(lost)

    async def _grow(self, slot_bytes: int) -> Slot | None:
        """Make a segment of that slot size, smaller if need be. None when quota or file system have no room."""
        max_slots = layout.SIZE_CLASSES.get(slot_bytes, 1)
        while (geometry := self._pool.plan(slot_bytes, max_slots)) is None:
            if not self._pool.retire_idle(slot_bytes):
                return None
        has_reaped = False
        while True:
            try:
                self._pool.add(await self._create(geometry))
                return self._pool.take(slot_bytes)
            except StoreError as err:
                self._pool.unplan(geometry)
                if not isinstance(err, StoreFullError):
                    raise
                log.warning("segment_refused", total_bytes=geometry.total_bytes, reason=str(err))
            if not has_reaped:
                # Under pressure leftovers of the dead go at once: their readers get a miss and derive again.
                has_reaped = True
                reap(self.config.folder, self.config.namespace, 0.0, self._clock.unix_s())
            else:
                max_slots = geometry.num_slots // 2
            smaller = self._pool.plan(slot_bytes, max_slots)
            if smaller is None:
                return None
            geometry = smaller

    async def _create(self, geometry: layout.Geometry) -> OwnedSegment:
        config = self.config
        name = layout.new_segment_name(config.namespace, config.owner, geometry.slot_bytes)
        loop = asyncio.get_running_loop()
        made = loop.run_in_executor(self._threads, OwnedSegment.create, config.folder, name, geometry)
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(lambda done: self._abandon(done, geometry))
            raise

    def _abandon(self, made: asyncio.Future[OwnedSegment], geometry: layout.Geometry) -> None:
        """The put that wanted a segment was cancelled meanwhile: keep the segment for the next."""
        if made.cancelled() or made.exception() is not None:
            self._pool.unplan(geometry)
        elif self._is_closed:
            made.result().unlink()
        else:
            self._pool.add(made.result())

    async def _fill(self, slot: Slot, array: Array, spec: TensorSpec, ttl_s: float, content_hash: str) -> TensorRef:
        number, offset = slot.place(spec.nbytes)
        target = slot.segment.view(slot.index, offset, spec)
        try:
            if spec.nbytes <= _LOOP_COPY_BYTES:
                np.copyto(target, array)
            else:
                await self._copy_in_thread(slot, target, array)
        except Exception:
            self._unlive(slot)
            raise
        if slot.segment.name not in self._pool.segments:
            raise StoreFullError("the segment was removed while it was written")
        expires_unix_s = self._clock.unix_s() + ttl_s
        generation = slot.segment.commit(number, Descriptor.of(spec, offset, expires_unix_s))
        place = ArenaPlace(boot_id=self.config.boot_id, segment=slot.segment.name, slot=number, generation=generation)
        self._held[place.segment, number] = _Held(slot, number, generation, spec.nbytes, expires_unix_s)
        self._put_total += 1
        return TensorRef(
            place=place,
            dtype=spec.dtype,
            shape=spec.shape,
            nbytes=spec.nbytes,
            content_hash=content_hash,
            expires_unix_s=expires_unix_s,
        )

    async def _copy_in_thread(self, slot: Slot, target: Array, array: Array) -> None:
        copied = asyncio.get_running_loop().run_in_executor(self._threads, np.copyto, target, array)
        try:
            await asyncio.shield(copied)
        except asyncio.CancelledError:
            # The thread still writes: the slot is free when it has finished.
            copied.add_done_callback(lambda _: self._unlive(slot))
            raise

    def _collect(self, now_unix_s: float) -> None:
        """Free what expired, what readers released, and what was released while a reader held it."""
        for held in list(self._held.values()):
            is_over = held.is_released or held.expires_unix_s <= now_unix_s
            if is_over or held.slot.segment.is_released(held.number):
                self._free(held)

    def _free(self, held: _Held) -> None:
        """Invalidate a tensor and free its slot, or remember to try again once its readers are gone."""
        if not held.slot.segment.try_invalidate(held.number):
            held.is_released = True
            return
        del self._held[held.slot.segment.name, held.number]
        self._unlive(held.slot)

    def _unlive(self, slot: Slot) -> None:
        slot.num_live -= 1
        self._give_if_empty(slot)

    def _give_if_empty(self, slot: Slot) -> None:
        if slot.num_live == 0 and not slot.is_reserved and slot.segment.name in self._pool.segments:
            self._pool.give(slot)

    def _end_reservation(self, reservation: ArenaReservation) -> None:
        if reservation in self._reservations:
            self._reservations.discard(reservation)
            for slot in reservation.slots:
                slot.is_reserved = False
                self._give_if_empty(slot)

    async def _put_reserved(
        self, reservation: ArenaReservation, array: Array, ttl_s: float, dtype: str | None, content_hash: str
    ) -> TensorRef:
        spec = spec_of_array(array, dtype)
        if reservation not in self._reservations:
            raise StoreFullError("the reservation is over")
        # The tightest fit: with slots for known parts, a small part never takes a large one's place.
        fitting = [
            slot
            for slot in reservation.slots
            if slot.segment.name in self._pool.segments and slot.has_room(spec.nbytes)
        ]
        if spec.nbytes > reservation.left_bytes or not fitting:
            raise StoreFullError(f"{spec.nbytes} bytes are more than was reserved")
        reservation.left_bytes -= spec.nbytes
        slot = min(fitting, key=lambda one: one.room_bytes)
        return await self._fill(slot, array, spec, ttl_s, content_hash)


class ArenaReservation:
    """Slots set aside. A put within what was reserved cannot fail for room until `cancel` or expiry."""

    def __init__(self, arena: ArenaConnector, nbytes: int, expires_unix_s: float) -> None:
        self.slots: list[Slot] = []
        self.left_bytes = nbytes
        self.expires_unix_s = expires_unix_s
        self._arena = arena

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        """As `Connector.put`. Raises StoreFullError for more than was reserved, or after the end."""
        return await self._arena._put_reserved(self, array, ttl_s, dtype, content_hash)

    async def cancel(self) -> None:
        self._arena._end_reservation(self)
