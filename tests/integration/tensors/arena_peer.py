"""A process that tests kill: `arena_peer.py ROLE FOLDER OWNER QUOTA_BYTES`, one hex-encoded reference per line.

Roles:
    write   put 1 MB tensors for ever, each filled with its own number, keep the last three; print each reference.
    flood   put 1 MB tensors until the arena is full, print each reference, then wait.
    big     put one 64 MB tensor again and again (most of the time is spent in the middle of a put).
    hold    read references from stdin, open a lease on each, print "held" after each, and wait.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from fleet_common.errors import StoreFullError
from fleet_common.settings import StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_contracts import codec
from fleet_contracts.tensors import TensorRef

_TTL_S = 600.0


def _tell(ref: TensorRef) -> None:
    print(codec.encode(ref).hex(), flush=True)


async def _write(store: FleetTensorStore) -> None:
    kept: list[TensorRef] = []
    for number in itertools.count(1):
        array = np.full(1 << 18, number, np.uint32)
        kept.append(await store.put(array, ttl_s=_TTL_S, locality=store.locality))
        _tell(kept[-1])
        if len(kept) > 3:
            await store.release(kept.pop(0))
        store.sweep(time.time())


async def _flood(store: FleetTensorStore) -> None:
    try:
        for number in itertools.count(1):
            _tell(await store.put(np.full(1 << 18, number, np.uint32), ttl_s=_TTL_S, locality=store.locality))
    except StoreFullError:
        print("full", flush=True)
    await asyncio.sleep(_TTL_S)


async def _big(store: FleetTensorStore) -> None:
    array = np.ones(64 << 20, np.uint8)
    while True:
        ref = await store.put(array, ttl_s=_TTL_S, locality=store.locality)
        _tell(ref)
        await store.release(ref)


async def _hold(store: FleetTensorStore) -> None:
    leases = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        ref = msgspec.msgpack.decode(bytes.fromhex(line), type=TensorRef)
        leases.append(await store.get(ref))
        print("held", flush=True)
    await asyncio.sleep(_TTL_S)


_ROLES = {"write": _write, "flood": _flood, "big": _big, "hold": _hold}


async def _main(role: str, folder: str, owner: str, quota_bytes: str) -> None:
    settings = StoreSettings(  # type: ignore[call-arg]
        arena_dir=Path(folder), arena_namespace="fault", arena_bytes=int(quota_bytes), shm_threshold_bytes=0
    )
    store = await open_store(settings, owner=owner)
    print("ready", flush=True)
    await _ROLES[role](store)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
