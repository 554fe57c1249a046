"""Figures of the tensor store, each beside a plain memcpy that alternates with it in one run."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from pydantic import SecretStr

from fleet_common.clock import SystemClock
from fleet_common.settings import StoreSettings
from fleet_common.tensors import layout
from fleet_common.tensors.arena import ArenaConfig, ArenaConnector, owner_token, read_boot_id
from fleet_common.tensors.factory import redis_connector
from fleet_common.tensors.port import Array, Connector
from fleet_common.testing.servers import valkey_server
from fleet_contracts.tensors import ArenaPlace, TensorRef
from loadtests.bench.figure import Figure

#: 576 image tokens x 4096 x bfloat16: the embeddings of one picture of a 7B model.
_SHAPE = (576, 4096)
_NUM_SLOTS = 8
_NUM_ROUNDS = 120
_NUM_SLOW_ROUNDS = 10
_TTL_S = 120.0
_SHM = Path("/dev/shm")

#: Handles one tensor, the number-th of a round, and returns the seconds it took.
Step = Callable[[int], Awaitable[float]]
#: Tidies up after a round.
Tidy = Callable[[], Awaitable[None]]


def figures() -> list[Figure]:
    """Measure everything; a few seconds."""
    with valkey_server() as server:
        return asyncio.run(_measure(server.url))


async def _measure(redis_url: str) -> list[Figure]:
    tensor: Array = np.random.default_rng(0).integers(0, 1 << 16, _SHAPE, dtype=np.uint16)
    settings = StoreSettings(redis_url=SecretStr(redis_url))  # type: ignore[call-arg]
    redis = redis_connector(settings, SystemClock())
    arena = _open_arena()
    assert redis is not None
    try:
        slots = await _slots_of(arena, tensor)
        memcpy = _memcpy_step(slots, tensor)
        put_s = await _alternate(*_put_steps(arena, tensor), memcpy, _NUM_ROUNDS)
        fresh_s = await _alternate(_fresh_segment_step(tensor), _nothing, memcpy, _NUM_SLOW_ROUNDS)
        redis_put_s = await _alternate(*_put_steps(redis, tensor), memcpy, _NUM_SLOW_ROUNDS)
        redis_get_s = await _alternate(*_get_steps(redis, tensor), memcpy, _NUM_SLOW_ROUNDS)
        get_s = await _arena_get_s(arena)
    finally:
        await arena.close()
        await redis.close()
    return [
        _beside("arena_put_4.7MB", put_s, f"memcpy over the same {_NUM_SLOTS} rotating slots"),
        Figure("arena_get", get_s * 1e6, "us", note="64 MB: lease, check, view, give back"),
        _beside("fresh_segment_4.7MB", fresh_s, "create, copy, unlink: a segment per tensor"),
        _beside("redis_put_4.7MB", redis_put_s, "loopback TCP"),
        _beside("redis_get_4.7MB", redis_get_s, "loopback TCP, checksum verified"),
    ]


def _beside(name: str, medians_s: tuple[float, float], note: str) -> Figure:
    value_s, memcpy_s = medians_s
    return Figure(name, value_s * 1e3, "ms", memcpy_s * 1e3, value_s / memcpy_s, note)


def _open_arena() -> ArenaConnector:
    config = ArenaConfig(
        folder=_SHM,
        namespace=f"bench{secrets.token_hex(4)}",
        owner=owner_token(""),
        boot_id=read_boot_id(),
        quota_bytes=256 << 20,
        grace_s=0.0,
    )
    return ArenaConnector(config, SystemClock())


async def _alternate(measured: Step, tidy: Tidy, reference: Step, num_rounds: int) -> tuple[float, float]:
    """Median seconds per tensor of both, tensor by tensor in turns: a busy neighbour hits them alike."""
    measured_s, reference_s = [], []
    for _ in range(num_rounds):
        for number in range(_NUM_SLOTS):
            measured_s.append(await measured(number))
            # Half a round away, so that neither finds the slot in the cache because the other just wrote it.
            reference_s.append(await reference((number + _NUM_SLOTS // 2) % _NUM_SLOTS))
        await tidy()
    return statistics.median(measured_s), statistics.median(reference_s)


async def _nothing() -> None:
    """No tidying."""


async def _slots_of(arena: ArenaConnector, tensor: Array) -> list[Array]:
    """A second mapping of the very slots that the rotating puts fill."""
    refs = [await arena.put(tensor, ttl_s=_TTL_S) for _ in range(_NUM_SLOTS)]
    slots = [_map_slot(ref, tensor) for ref in refs]
    for ref in reversed(refs):
        await arena.release(ref)
    return slots


def _map_slot(ref: TensorRef, like: Array) -> Array:
    assert isinstance(ref.place, ArenaPlace)
    fd = os.open(_SHM / ref.place.segment, os.O_RDWR | os.O_CLOEXEC)
    try:
        geometry = layout.parse_header(os.pread(fd, layout.HEADER_BYTES, 0), os.fstat(fd).st_size)
        assert geometry is not None
        memory = mmap.mmap(fd, geometry.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    offset = geometry.slot_offset(ref.place.slot // layout.PARTS_PER_SLOT)
    return np.ndarray(like.shape, like.dtype, buffer=memory, offset=offset)


def _memcpy_step(slots: list[Array], tensor: Array) -> Step:
    async def step(number: int) -> float:
        started_s = time.perf_counter()
        np.copyto(slots[number], tensor)
        return time.perf_counter() - started_s

    return step


def _put_steps(connector: Connector, tensor: Array) -> tuple[Step, Tidy]:
    refs: list[TensorRef] = []

    async def step(_: int) -> float:
        started_s = time.perf_counter()
        refs.append(await connector.put(tensor, ttl_s=_TTL_S))
        return time.perf_counter() - started_s

    async def tidy() -> None:
        # Newest first, so that the last-in-first-out free list hands the slots out in the same order again.
        while refs:
            await connector.release(refs.pop())

    return step, tidy


def _get_steps(connector: Connector, tensor: Array) -> tuple[Step, Tidy]:
    refs: list[TensorRef] = []

    async def step(_: int) -> float:
        ref = await connector.put(tensor, ttl_s=_TTL_S)
        refs.append(ref)
        started_s = time.perf_counter()
        (await connector.get(ref)).close()
        return time.perf_counter() - started_s

    async def tidy_up() -> None:
        while refs:
            await connector.release(refs.pop())

    return step, tidy_up


def _fresh_segment_step(tensor: Array) -> Step:
    async def step(_: int) -> float:
        started_s = time.perf_counter()
        path = _SHM / f"bench-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, tensor.nbytes)
            memory = mmap.mmap(fd, tensor.nbytes)
            np.copyto(np.ndarray(tensor.shape, tensor.dtype, buffer=memory), tensor)
        finally:
            os.close(fd)
            path.unlink()
        return time.perf_counter() - started_s

    return step


async def _arena_get_s(arena: ArenaConnector) -> float:
    """Median seconds of opening and closing a 64 MB tensor, its segment mapped already."""
    ref = await arena.put(np.ones(64 << 20, np.uint8), ttl_s=_TTL_S)
    (await arena.get(ref)).close()
    samples = []
    for _ in range(1000):
        started_s = time.perf_counter()
        (await arena.get(ref)).close()
        samples.append(time.perf_counter() - started_s)
    return statistics.median(samples)
