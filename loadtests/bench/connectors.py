"""Every tensor connector beside a memcpy: put, get and hop, tensor by tensor in turns.

A hop is a put, the reference through a pipe to another process, a get there, and its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fleet_common.settings import StoreSettings
from fleet_common.tensors.factory import memory_store, open_store
from fleet_common.tensors.port import Array
from fleet_common.tensors.router import FleetTensorStore
from fleet_common.testing.servers import mooncake_servers, valkey_server, yuanrong_worker
from fleet_contracts import codec
from fleet_contracts.tensors import TensorRef
from loadtests.bench.figure import Figure

#: Bytes of a tensor and how often it is moved. 4.7 MB: 576 image tokens x 4096 x bfloat16.
_SIZES = {"64KB": (64 << 10, 40), "4.7MB": (576 * 4096 * 2, 20), "64MB": (64 << 20, 6)}
_TTL_S = 120.0
_MEMORY_MB = 512

#: vLLM-Omni's hand-off (put and get, no message), measured by its own code; milliseconds.
_VLLM_OMNI_MS = {"4.7MB": 19.0, "64MB": 606.0}


@dataclass(slots=True)
class _Side:
    """A connector under test: our store, and a reader in a process of its own (None: it cannot leave this one)."""

    name: str
    store: FleetTensorStore
    reader: subprocess.Popen[bytes] | None
    locality: str | None
    samples_s: dict[str, list[float]] = field(default_factory=lambda: {"put": [], "get": [], "hop": []})


def figures() -> list[Figure]:
    """Measure everything; about a minute."""
    with contextlib.ExitStack() as held:
        return asyncio.run(_measure(held.enter_context(_stores())))


@contextlib.contextmanager
def _stores() -> Iterator[Mapping[str, dict[str, Any]]]:
    """Settings of each connector's store; its servers run meanwhile."""
    with (
        TemporaryDirectory(prefix="bench-yuanrong-") as logs,
        valkey_server() as valkey,
        mooncake_servers(memory_mb=_MEMORY_MB) as mooncake,
        yuanrong_worker(memory_mb=_MEMORY_MB) as yuanrong,
    ):
        os.environ["DATASYSTEM_CLIENT_LOG_DIR"] = logs
        yield {
            "arena": {"arena_namespace": f"bench{os.getpid()}", "arena_bytes": 512 << 20},
            "redis": {"arena_bytes": 0, "redis_url": valkey.url},
            "mooncake": {"arena_bytes": 0, "mooncake": {"master_address": mooncake.address}},
            "yuanrong": {"arena_bytes": 0, "yuanrong": {"worker_address": yuanrong.url, "timeout_s": 5.0}},
        }


async def _measure(stores: Mapping[str, dict[str, Any]]) -> list[Figure]:
    async with contextlib.AsyncExitStack() as held:
        sides = [_Side("memory", memory_store(), None, None)]
        for name, settings in stores.items():
            sides.append(await _open(name, settings, held))
        found: list[Figure] = []
        for size, (nbytes, num_rounds) in _SIZES.items():
            tensor: Array = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
            memcpy_s = await _rounds(sides, tensor, num_rounds)
            found.append(Figure(f"connector_memcpy_{size}", memcpy_s * 1e3, "ms", note="into the same warm memory"))
            for side in sides:
                found += _figures_of(side, size, memcpy_s)
                side.samples_s = {operation: [] for operation in side.samples_s}
        return found


async def _open(name: str, settings: dict[str, Any], held: contextlib.AsyncExitStack) -> _Side:
    reader = _start_reader(settings)
    held.callback(_end, reader)
    store = await open_store(StoreSettings.model_validate(settings))
    held.push_async_callback(store.close)
    return _Side(name, store, reader, store.locality if name == "arena" else None)


def _start_reader(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "loadtests.bench.connector_reader", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _end(reader: subprocess.Popen[bytes]) -> None:
    assert reader.stdin is not None
    reader.stdin.close()
    try:
        reader.wait(10)
    except subprocess.TimeoutExpired:
        reader.kill()
        reader.wait()


async def _rounds(sides: list[_Side], tensor: Array, num_rounds: int) -> float:
    """Every connector once per round, after a memcpy each. Returns the median seconds of a memcpy."""
    copy = np.empty_like(tensor)
    memcpy_s = []
    # The first round connects and touches memory for the first time: it does not count.
    for number in range(num_rounds + 1):
        for side in sides:
            started_s = time.perf_counter()
            np.copyto(copy, tensor)
            memcpy_s.append(time.perf_counter() - started_s)
            taken_s = await _once(side, tensor)
            if number:
                for operation, value_s in taken_s.items():
                    side.samples_s[operation].append(value_s)
    return statistics.median(memcpy_s[len(sides) :])


async def _once(side: _Side, tensor: Array) -> dict[str, float]:
    store = side.store
    started_s = time.perf_counter()
    ref = await store.put(tensor, ttl_s=_TTL_S, locality=side.locality)
    put_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    with await store.get(ref) as lease:
        get_s = time.perf_counter() - started_s
        assert lease.array[-1] == tensor[-1]
    await store.release(ref)
    started_s = time.perf_counter()
    ref = await store.put(tensor, ttl_s=_TTL_S, locality=side.locality)
    await _read_there(side, ref)
    hop_s = time.perf_counter() - started_s
    await store.release(ref)
    store.sweep(time.time())
    return {"put": put_s, "get": get_s, "hop": hop_s}


async def _read_there(side: _Side, ref: TensorRef) -> None:
    """Send the reference to the reader, which opens the tensor and answers."""
    if side.reader is None:
        (await side.store.get(ref)).close()
        return
    assert side.reader.stdin is not None and side.reader.stdout is not None
    side.reader.stdin.write(codec.encode(ref).hex().encode() + b"\n")
    side.reader.stdin.flush()
    if (answer := side.reader.stdout.readline()) != b"ok\n":
        raise RuntimeError(f"the reader of {side.name} answered {answer!r}")


def _figures_of(side: _Side, size: str, memcpy_s: float) -> list[Figure]:
    found = []
    for operation, samples_s in side.samples_s.items():
        value_ms = statistics.median(samples_s) * 1e3
        reference_ms, note = memcpy_s * 1e3, "beside memcpy"
        if operation == "hop" and size in _VLLM_OMNI_MS:
            reference_ms, note = _VLLM_OMNI_MS[size], "beside vLLM-Omni's put and get, measured elsewhere"
        if operation == "hop" and side.reader is None:
            note += "; within one process"
        name = f"connector_{side.name}_{operation}_{size}"
        found.append(Figure(name, value_ms, "ms", reference_ms, value_ms / reference_ms, note))
    return found
