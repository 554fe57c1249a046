"""Processes and shared memory of a stack, found by the mark in their environment: no pid can be taken for another."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet_common.tensors.arena import owner_token
from fleet_common.tensors.reaper import reap

#: Every child and whatever it starts carries this variable; the value is the stack's namespace. A process that writes
#: its own title may lose it (valkey-server, unless told not to): hence `Identity` beside it.
MARK = "OMNIFLEET_STACK"

ARENA_DIR = Path("/dev/shm")
_END_TIMEOUT_S = 5.0
_TRACKER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process as the kernel knows it: a pid alone may be somebody else's by now.

    Attributes:
        start_ticks: field 22 of /proc/<pid>/stat.
    """

    pid: int
    start_ticks: int


def identity(pid: int) -> Identity | None:
    """A process as it is now, None when there is none (a zombie is none)."""
    try:
        fields = _stat_fields(pid)
    except OSError:
        return None
    return None if fields[0] == "Z" else Identity(pid, int(fields[19]))


def _stat_fields(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on: the name before it, in parentheses, may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def stack_processes(namespace: str) -> list[int]:
    """Pids of the stack's processes, helpers of its children included; zombies are none."""
    mark = f"{MARK}={namespace}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Gone meanwhile, or another user's.
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def end_processes(namespace: str, known: Iterable[Identity] = ()) -> list[int]:
    """SIGKILL every process of the stack, and those `known` to be its own, and wait until they are gone.

    Returns their pids.
    """
    recorded = tuple(known)

    def find() -> list[int]:
        return sorted({*stack_processes(namespace), *(own.pid for own in recorded if identity(own.pid) == own)})

    return _end(find)


def end_group(group: int) -> list[int]:
    """SIGKILL what is left of a process group, as `end_processes` does."""
    return _end(lambda: group_processes(group))


def group_processes(group: int) -> list[int]:
    """Pids of a process group; zombies are none."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, pgrp = _stat_fields(int(entry.name))[:3]
            if state != "Z" and int(pgrp) == group:
                found.append(int(entry.name))
    return sorted(found)


def _end(find: Callable[[], list[int]]) -> list[int]:
    ended: list[int] = []
    begun_s = time.monotonic()
    while (alive := find()) and time.monotonic() - begun_s < _END_TIMEOUT_S:
        is_patient = time.monotonic() - begun_s < _TRACKER_TIMEOUT_S
        for pid in alive:
            # A tracker removes the semaphores of those it served once they are dead, and ends by itself.
            if not (is_patient and _is_resource_tracker(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ended += [pid for pid in alive if pid not in ended]
        time.sleep(0.02)
    return ended


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def remove_segments_of(namespace: str, owner: str) -> tuple[str, ...]:
    """The same for the segments of one process that is dead."""
    return reap(ARENA_DIR, namespace, 0.0, time.time(), owner=owner_token(owner)).segments


def remove_segments(namespace: str) -> tuple[str, ...]:
    """Unlink every segment of the namespace whose owner is dead, whatever it holds."""
    return reap(ARENA_DIR, namespace, 0.0, time.time()).segments
