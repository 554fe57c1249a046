"""Layout of an arena segment: a header page, the descriptors, then 4 KiB-aligned data slots.

    0            header: magic, version, slots, parts per slot, slot bytes, offsets, total bytes (u64 each)
    4096         descriptors, 64 bytes each: one per (slot, part)
    data_offset  slots

A slot is what the allocator hands out. An ordinary put uses part 0 and nothing else; a reservation fills its slot
with up to `PARTS_PER_SLOT` tensors, each with a descriptor, a generation and a lease byte of its own.
`ArenaPlace.slot` is the number of the descriptor.
"""

from __future__ import annotations

import re
import secrets
import struct
from dataclasses import dataclass

PAGE_BYTES = 4096
DESCRIPTOR_BYTES = 64
PARTS_PER_SLOT = 16

_MAGIC = int.from_bytes(b"OMNIARN1", "little")
_VERSION = 1
_HEADER = struct.Struct("<8Q")
HEADER_BYTES = _HEADER.size

#: u64 words of a descriptor. The generation is odd while the part is free or being written, even once committed.
#: `RELEASED` is the one word others write: a reader that is done stores the generation it read, the owner frees the
#: part when both agree, so a late or forged value does no harm.
WORDS = DESCRIPTOR_BYTES // 8
GENERATION, NBYTES, OFFSET, EXPIRES_US, SIGNATURE, RELEASED = range(6)

#: Slot sizes, and how many slots a segment of that size has at most: growth costs page faults, about 1 ms per MB.
SIZE_CLASSES: dict[int, int] = {64 << 10: 64, 1 << 20: 16, 8 << 20: 4, 64 << 20: 1}
_CLASS_LABELS = {64 << 10: "64k", 1 << 20: "1m", 8 << 20: "8m", 64 << 20: "64m"}
_DEDICATED_LABEL = "big"

#: More than any segment of ours has: bounds what a reader believes of a header.
_MAX_SLOTS = 1 << 16

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SEGMENT = re.compile(r"([A-Za-z0-9_-]{1,40})-([0-9a-f]{16})-([0-9a-z]{1,4})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in a segment."""

    num_slots: int
    slot_bytes: int

    @property
    def num_descriptors(self) -> int:
        return self.num_slots * PARTS_PER_SLOT

    @property
    def data_offset(self) -> int:
        return PAGE_BYTES + align(self.num_descriptors * DESCRIPTOR_BYTES)

    @property
    def total_bytes(self) -> int:
        return self.data_offset + self.num_slots * self.slot_bytes

    def slot_offset(self, index: int) -> int:
        """File offset of a slot's data."""
        return self.data_offset + index * self.slot_bytes

    def pack(self) -> bytes:
        """The header."""
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.num_slots,
            PARTS_PER_SLOT,
            self.slot_bytes,
            PAGE_BYTES,
            self.data_offset,
            self.total_bytes,
        )


def parse_header(raw: bytes, file_bytes: int) -> Geometry | None:
    """The geometry a header tells, None unless it is ours, complete, and the file as large as it says."""
    if len(raw) < _HEADER.size:
        return None
    _, _, num_slots, _, slot_bytes, _, _, total_bytes = _HEADER.unpack_from(raw)
    geometry = Geometry(num_slots=num_slots, slot_bytes=slot_bytes)
    if not 0 < num_slots <= _MAX_SLOTS or slot_bytes % PAGE_BYTES or total_bytes != file_bytes:
        return None
    return geometry if raw[: _HEADER.size] == geometry.pack() else None


def align(nbytes: int) -> int:
    """Round up to whole pages, at least one."""
    return max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


def slot_bytes_for(nbytes: int) -> int:
    """The smallest slot size that holds `nbytes`; above all classes its own size, in a segment of its own."""
    return next((slot_bytes for slot_bytes in SIZE_CLASSES if nbytes <= slot_bytes), align(nbytes))


def check_namespace(namespace: str) -> None:
    """ValueError for a namespace that cannot be part of a segment's name."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"not usable as an arena namespace: {namespace!r}")


def new_segment_name(namespace: str, owner: str, slot_bytes: int) -> str:
    """`<namespace>-<owner token>-<class>-<random>`."""
    label = _CLASS_LABELS.get(slot_bytes, _DEDICATED_LABEL)
    return f"{namespace}-{owner}-{label}-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's name that mean something to others."""

    namespace: str
    owner: str


def parse_segment_name(name: str) -> SegmentName | None:
    """Take a name apart, None when it is no segment of ours (a path, for instance)."""
    match = _SEGMENT.fullmatch(name)
    return SegmentName(namespace=match[1], owner=match[2]) if match else None
