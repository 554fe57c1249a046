"""The producer's bookkeeping: free slots per size class, and how many bytes of segments there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_common.tensors import layout
from fleet_common.tensors.layout import Geometry
from fleet_common.tensors.segment import OwnedSegment


@dataclass(slots=True)
class Slot:
    """A slot that is taken.

    Attributes:
        num_live: tensors in it that are not freed yet.
        is_reserved: a reservation may still add to it.
        next_part, next_offset: where the next tensor goes.
    """

    segment: OwnedSegment
    index: int
    num_live: int = 0
    is_reserved: bool = False
    next_part: int = 0
    next_offset: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes not taken yet."""
        return self.segment.geometry.slot_bytes - self.next_offset

    def has_room(self, nbytes: int) -> bool:
        """Whether one more tensor fits."""
        return self.next_part < layout.PARTS_PER_SLOT and nbytes <= self.room_bytes

    def place(self, nbytes: int) -> tuple[int, int]:
        """Take the next part: (descriptor number, offset in the slot)."""
        number, offset = self.index * layout.PARTS_PER_SLOT + self.next_part, self.next_offset
        self.next_part += 1
        self.next_offset += layout.align(nbytes)
        self.num_live += 1
        return number, offset


@dataclass(slots=True)
class SlotPool:
    """Free slots and the quota. No I/O but unlinking what is given up; not thread-safe.

    Attributes:
        quota_bytes: limit on the size of all segments together.
        created_bytes: size of all segments, those being made included.
        free: last freed first, so that reuse finds the slot still in the CPU's cache.
    """

    quota_bytes: int
    created_bytes: int = 0
    segments: dict[str, OwnedSegment] = field(default_factory=dict)
    free: dict[int, list[Slot]] = field(default_factory=lambda: {slot_bytes: [] for slot_bytes in layout.SIZE_CLASSES})

    def take(self, slot_bytes: int) -> Slot | None:
        """A free slot of exactly that size."""
        slots = self.free.get(slot_bytes)
        return slots.pop() if slots else None

    def take_larger(self, slot_bytes: int) -> Slot | None:
        """A free slot of a bigger class: better a bad fit than no room."""
        for larger, slots in self.free.items():
            if larger > slot_bytes and slots:
                return slots.pop()
        return None

    def plan(self, slot_bytes: int, max_slots: int) -> Geometry | None:
        """The largest segment of a class the quota still allows; its bytes are counted at once. None: no room."""
        num_slots = max_slots
        while num_slots:
            geometry = Geometry(num_slots=num_slots, slot_bytes=slot_bytes)
            if self.created_bytes + geometry.total_bytes <= self.quota_bytes:
                self.created_bytes += geometry.total_bytes
                return geometry
            num_slots //= 2
        return None

    def unplan(self, geometry: Geometry) -> None:
        """The segment could not be made."""
        self.created_bytes -= geometry.total_bytes

    def add(self, segment: OwnedSegment) -> None:
        """A planned segment is there; its slots are free."""
        self.segments[segment.name] = segment
        for index in reversed(range(segment.geometry.num_slots)):
            self.free.setdefault(segment.geometry.slot_bytes, []).append(Slot(segment, index))

    def give(self, slot: Slot) -> None:
        """A slot is free again. A dedicated segment goes with its tensor."""
        slot.is_reserved, slot.num_live, slot.next_part, slot.next_offset = False, 0, 0, 0
        slot_bytes = slot.segment.geometry.slot_bytes
        self.free.setdefault(slot_bytes, []).append(slot)
        if slot_bytes not in layout.SIZE_CLASSES:
            self.retire(slot.segment)
            del self.free[slot_bytes]

    def retire_idle(self, wanted_slot_bytes: int) -> bool:
        """Give up one wholly free segment of another class, so that the wanted one can grow."""
        for slot_bytes, slots in self.free.items():
            if slot_bytes == wanted_slot_bytes:
                continue
            idle: dict[str, int] = {}
            for slot in slots:
                idle[slot.segment.name] = idle.get(slot.segment.name, 0) + 1
            for name, count in idle.items():
                if count == self.segments[name].geometry.num_slots:
                    self.retire(self.segments[name])
                    return True
        return False

    def retire(self, segment: OwnedSegment) -> None:
        """Unlink a segment and forget its slots."""
        slot_bytes = segment.geometry.slot_bytes
        self.free[slot_bytes] = [slot for slot in self.free.get(slot_bytes, []) if slot.segment is not segment]
        del self.segments[segment.name]
        self.created_bytes -= segment.geometry.total_bytes
        segment.unlink()
