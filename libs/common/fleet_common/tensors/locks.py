"""Open-file-description byte-range locks: leases that the kernel drops when their holder dies, however it dies.

They belong to the open file description, so they work across PID namespaces and conflict within one process as well.
A mapping keeps its description open: a lock must be given back explicitly, closing the descriptor is not enough.
"""

from __future__ import annotations

import errno
import fcntl
import struct

# struct flock of 64-bit Linux: type, whence, start, len, pid (must be 0 for OFD locks), padded to 32 bytes.
_FLOCK = struct.Struct("@hhqqi4x")

#: Locked bytes lie far past the end of any segment, so that they never stand for data.
_OWNER_BYTE = 1 << 40
_FIRST_SLOT_BYTE = _OWNER_BYTE + 1


def try_lock_owner(fd: int) -> bool:
    """Claim the segment for the life of this description. False when its owner lives."""
    return _try_lock(fd, fcntl.F_WRLCK, _OWNER_BYTE)


def unlock_owner(fd: int) -> None:
    """Give the segment up."""
    _unlock(fd, _OWNER_BYTE)


def try_share_slot(fd: int, slot: int) -> bool:
    """Take a reader's lease. False while the owner is freeing the slot."""
    return _try_lock(fd, fcntl.F_RDLCK, _FIRST_SLOT_BYTE + slot)


def try_lock_slot(fd: int, slot: int) -> bool:
    """Take a slot for freeing. False while a reader holds a lease."""
    return _try_lock(fd, fcntl.F_WRLCK, _FIRST_SLOT_BYTE + slot)


def unlock_slot(fd: int, slot: int) -> None:
    """Give a lease or a freed slot back."""
    _unlock(fd, _FIRST_SLOT_BYTE + slot)


def has_leases(fd: int) -> bool:
    """Whether any other description holds a lease on any slot."""
    # A length of 0 reaches to the largest offset: all slots, without reading how many there are.
    probe = _FLOCK.pack(fcntl.F_WRLCK, 0, _FIRST_SLOT_BYTE, 0, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, probe)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _try_lock(fd: int, kind: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, byte, 1, 0))
    except OSError as err:
        if err.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, byte, 1, 0))
