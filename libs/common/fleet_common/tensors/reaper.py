"""Removes segments that dead processes left behind. Any process may run it at any time."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from fleet_common.tensors import layout, locks

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What a reap removed."""

    segments: tuple[str, ...] = ()
    freed_bytes: int = 0


def reap(folder: Path, namespace: str, grace_s: float, now_unix_s: float, *, owner: str | None = None) -> ReapReport:
    """Unlink segments whose owner is dead and that nobody leases.

    A segment that still holds tensors which have not expired stays until `grace_s` after its owner's last sign of
    life: work that refers to them may be on its way. Segments of the living are never touched.

    Args:
        grace_s: 0 = whatever they hold.
        owner: only segments of this owner token; None = of every owner in the namespace.
    """
    removed: list[str] = []
    freed_bytes = 0
    for path in sorted(folder.glob(f"{namespace}-*")):
        name = layout.parse_segment_name(path.name)
        if name is None or name.namespace != namespace or owner not in (None, name.owner):
            continue
        size_bytes = _reap_one(path, grace_s, now_unix_s)
        if size_bytes is not None:
            removed.append(path.name)
            freed_bytes += size_bytes
    return ReapReport(tuple(removed), freed_bytes)


def _reap_one(path: Path, grace_s: float, now_unix_s: float) -> int | None:
    """Bytes freed, None when the segment has to stay."""
    try:
        fd = os.open(path, _OPEN)
    except OSError:  # gone meanwhile, or another user's: not ours to judge
        return None
    try:
        # Holding the owner's byte also keeps a process that is just creating this file from using it.
        if not locks.try_lock_owner(fd):
            return None
        try:
            facts = os.fstat(fd)
            if locks.has_leases(fd):
                return None
            if (
                grace_s > 0
                and now_unix_s - facts.st_mtime < grace_s
                and _has_live_tensors(fd, facts.st_size, now_unix_s)
            ):
                return None
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return facts.st_size
        finally:
            locks.unlock_owner(fd)
    finally:
        os.close(fd)


def _has_live_tensors(fd: int, file_bytes: int, now_unix_s: float) -> bool:
    """Whether any part is committed, not released and not expired."""
    geometry = layout.parse_header(os.pread(fd, layout.HEADER_BYTES, 0), file_bytes)
    if geometry is None:  # its owner died while making it
        return False
    raw = os.pread(fd, geometry.num_descriptors * layout.DESCRIPTOR_BYTES, layout.PAGE_BYTES)
    words = memoryview(raw).cast("Q")
    for base in range(0, len(words), layout.WORDS):
        generation = words[base + layout.GENERATION]
        is_live = generation & 1 == 0 and words[base + layout.RELEASED] != generation
        if is_live and words[base + layout.EXPIRES_US] / 1e6 > now_unix_s:
            return True
    return False
