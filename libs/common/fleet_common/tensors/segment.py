"""One segment file: created and written by its owner, mapped read-only by everybody else."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from fleet_common.errors import StoreError, StoreFullError
from fleet_common.tensors import layout, locks
from fleet_common.tensors.layout import Geometry
from fleet_common.tensors.port import Array
from fleet_common.tensors.spec import TensorSpec

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a committed part holds. `offset` counts from the start of its slot."""

    nbytes: int
    offset: int
    expires_unix_s: float
    signature: int

    @classmethod
    def of(cls, spec: TensorSpec, offset: int, expires_unix_s: float) -> Descriptor:
        """Describe a tensor at `offset` of its slot."""
        return cls(spec.nbytes, offset, expires_unix_s, signature(spec))


def signature(spec: TensorSpec) -> int:
    """64 bits that tell (dtype, shape) apart: a reference must name the tensor that was stored."""
    return xxhash.xxh3_64_intdigest(f"{spec.dtype}{spec.shape}".encode())


class OwnedSegment:
    """A segment this process made. Only the owner writes data and generations.

    Not thread-safe, except that `view` may be filled in a thread before `commit`.
    """

    def __init__(self, path: Path, fd: int, memory: mmap.mmap, geometry: Geometry) -> None:
        self.name = path.name
        self.geometry = geometry
        self._path = path
        self._fd = fd
        self._memory = memory
        end = layout.PAGE_BYTES + geometry.num_descriptors * layout.DESCRIPTOR_BYTES
        self._words = memoryview(memory)[layout.PAGE_BYTES : end].cast("Q")
        # Random start: even a segment that were made again under the same name could not repeat a generation.
        self._generation = secrets.randbits(62) << 1

    @classmethod
    def create(cls, folder: Path, name: str, geometry: Geometry) -> OwnedSegment:
        """Make, preallocate and claim a segment. Slow (page faults, about 1 ms per MB): call it in a thread.

        Raises:
            StoreFullError: the file system has no room; nothing is left behind.
            StoreError: the folder cannot be used.
        """
        path = folder / name
        try:
            fd = os.open(path, _CREATE, 0o600)
        except OSError as err:
            kind = StoreFullError if err.errno == errno.ENOSPC else StoreError
            raise kind(f"cannot create a segment in {folder}: {err.strerror}") from err
        try:
            return cls._claim(path, fd, geometry)
        except BaseException as err:
            os.close(fd)
            # A reaper that looked before the claim may have taken the file away already.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            if isinstance(err, OSError):
                kind = StoreFullError if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM) else StoreError
                raise kind(f"cannot allocate {geometry.total_bytes} bytes in {folder}: {err.strerror}") from err
            raise

    @classmethod
    def _claim(cls, path: Path, fd: int, geometry: Geometry) -> OwnedSegment:
        if not locks.try_lock_owner(fd) or os.fstat(fd).st_nlink == 0:
            raise StoreError("a reaper took the new segment for an orphan")
        # Without it a full /dev/shm shows only at the first write, as SIGBUS.
        os.posix_fallocate(fd, 0, geometry.total_bytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(fd, geometry.total_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        segment = cls(path, fd, memory, geometry)
        for number in range(geometry.num_descriptors):
            segment._words[number * layout.WORDS + layout.GENERATION] = 1
        header = geometry.pack()
        memory[: len(header)] = header
        return segment

    def view(self, index: int, offset: int, spec: TensorSpec) -> Array:
        """Writable array over part of a slot."""
        start = self.geometry.slot_offset(index) + offset
        return np.ndarray(spec.shape, spec.stored, buffer=self._memory, offset=start)

    def commit(self, number: int, descriptor: Descriptor) -> int:
        """Publish a part whose bytes are written. Returns its generation."""
        self._generation += 2
        base = number * layout.WORDS
        self._words[base + layout.NBYTES] = descriptor.nbytes
        self._words[base + layout.OFFSET] = descriptor.offset
        self._words[base + layout.EXPIRES_US] = int(descriptor.expires_unix_s * 1e6)
        self._words[base + layout.SIGNATURE] = descriptor.signature
        self._words[base + layout.RELEASED] = 0
        # Last: before it the part is odd, and no reader believes the words above.
        self._words[base + layout.GENERATION] = self._generation
        return self._generation

    def try_invalidate(self, number: int) -> bool:
        """Take a part back: False while a reader holds it. Every reference to it is stale from here on."""
        if not locks.try_lock_slot(self._fd, number):
            return False
        self._words[number * layout.WORDS + layout.GENERATION] |= 1
        locks.unlock_slot(self._fd, number)
        return True

    def generation(self, number: int) -> int:
        """Current generation of a part."""
        return self._words[number * layout.WORDS + layout.GENERATION]

    def is_released(self, number: int) -> bool:
        """Whether a reader has said that it was the last one to need the part."""
        base = number * layout.WORDS
        return self._words[base + layout.RELEASED] == self._words[base + layout.GENERATION]

    @property
    def is_unlinked(self) -> bool:
        """Whether somebody removed the file: no reader can find it any more."""
        return os.fstat(self._fd).st_nlink == 0

    def touch(self) -> None:
        """Mark the file as in use: the reaper's grace counts from here once the owner is dead."""
        os.utime(self._fd)

    def unlink(self) -> None:
        """Remove the file and give the claim up. Leases of readers keep their bytes."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        locks.unlock_owner(self._fd)
        os.close(self._fd)
        self._words.release()
        # A thread may still hold a view while it finishes a cancelled copy: the mapping goes with its last view.
        with contextlib.suppress(BufferError):
            self._memory.close()


class MappedSegment:
    """A reader's mapping. Raises FileNotFoundError / ValueError from `open` for what is not there or not ours."""

    def __init__(self, fd: int, memory: mmap.mmap, geometry: Geometry) -> None:
        self.geometry = geometry
        self._fd = fd
        self._memory = memory
        end = layout.PAGE_BYTES + geometry.num_descriptors * layout.DESCRIPTOR_BYTES
        self._words = memoryview(memory)[layout.PAGE_BYTES : end].cast("Q")

    @classmethod
    def open(cls, folder: Path, name: str) -> MappedSegment:
        """Map a segment read-only.

        Raises:
            OSError: it is not there.
            ValueError: it is no segment of this user.
        """
        fd = os.open(folder / name, _READ)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise ValueError("not a segment of this user")
            geometry = layout.parse_header(os.pread(fd, layout.HEADER_BYTES, 0), facts.st_size)
            if geometry is None:
                raise ValueError("not a segment")
            memory = mmap.mmap(fd, geometry.total_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, memory, geometry)

    def share(self, number: int) -> bool:
        """Take the kernel's lease on a part; False while its owner is freeing it."""
        return locks.try_share_slot(self._fd, number)

    def unshare(self, number: int) -> None:
        locks.unlock_slot(self._fd, number)

    def descriptor(self, number: int, generation: int) -> Descriptor | None:
        """The part's descriptor, None unless it is committed at that generation."""
        base = number * layout.WORDS
        words = self._words
        if generation & 1 or words[base + layout.GENERATION] != generation:
            return None
        return Descriptor(
            nbytes=words[base + layout.NBYTES],
            offset=words[base + layout.OFFSET],
            expires_unix_s=words[base + layout.EXPIRES_US] / 1e6,
            signature=words[base + layout.SIGNATURE],
        )

    def view(self, number: int, offset: int, nbytes: int) -> Array:
        """Read-only bytes of a part, uint8 [nbytes]; they keep the mapping alive."""
        start = self.geometry.slot_offset(number // layout.PARTS_PER_SLOT) + offset
        return np.ndarray((nbytes,), np.uint8, buffer=self._memory, offset=start)

    @property
    def is_unlinked(self) -> bool:
        """Whether the file is gone: nothing new will ever be read from it."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Drop the mapping; views that are left keep it until they go."""
        os.close(self._fd)
        self._words.release()
        with contextlib.suppress(BufferError):
            self._memory.close()


def mark_released(folder: Path, name: str, number: int, generation: int) -> None:
    """Tell the owner that a part is needed no more. What is gone, or never was, is fine."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / name, _WRITE)
        try:
            geometry = layout.parse_header(os.pread(fd, layout.HEADER_BYTES, 0), os.fstat(fd).st_size)
            if geometry is not None and 0 <= number < geometry.num_descriptors and 0 <= generation < 1 << 64:
                word = number * layout.WORDS + layout.RELEASED
                os.pwrite(fd, generation.to_bytes(8, "little"), layout.PAGE_BYTES + word * 8)
        finally:
            os.close(fd)
