"""The cost of one hop: publish -> worker process -> publish, with a scripted engine and the real broker and arena."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from fleet_common.bus.apply import apply
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.port import WorkMessage
from fleet_common.settings import BusSettings, StoreSettings
from fleet_common.stage.plan import task_of
from fleet_common.tensors.arena import read_boot_id
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_common.testing.fake_ingress import FakeIngress
from fleet_common.testing.plans import MODEL, POOLS, chat_task, one_pool_table
from fleet_common.testing.servers import nats_server
from fleet_contracts import codec, subjects
from fleet_contracts.base import PriorityClass, Stage, StepId, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec
from fleet_contracts.work import StepOutput
from loadtests.bench.figure import Figure

_NUM_ROUNDS = 400
_NUM_WARM = 50
_START_S = 20.0
_WORKER = WorkerId("v0")
_SPEC = FleetSpec(pools=tuple(PoolSpec(stage=s, pool=p, model=MODEL, workers=(_WORKER,)) for s, p in POOLS.items()))


def figures() -> list[Figure]:
    """Measure; a few seconds."""
    namespace = f"bench{secrets.token_hex(4)}"
    with nats_server() as server, _worker(server.url, namespace) as log_path:
        spent_s, floor_s = uvloop.run(_measure(server.url, namespace, log_path))
    p99_s = statistics.quantiles(spent_s, n=100)[98]
    floor_p50_s = statistics.median(floor_s)
    return [
        _figure(
            "hop_p50", statistics.median(spent_s), floor_p50_s, "publish -> worker -> publish, picture in the arena"
        ),
        _figure("hop_p99", p99_s, floor_p50_s, "the same, slowest hundredth"),
    ]


def _figure(name: str, value_s: float, floor_s: float, note: str) -> Figure:
    return Figure(name, value_s * 1e3, "ms", floor_s * 1e3, value_s / floor_s, f"{note}; beside publish -> pull alone")


@contextlib.contextmanager
def _worker(url: str, namespace: str) -> Iterator[Path]:
    """A vision worker, started once the topology is there: it waits for the broker by itself."""
    uvloop.run(_apply(url))
    environment = {
        **os.environ,
        "FLEET_BUS__URL": url,
        "FLEET_STORE__ARENA_NAMESPACE": namespace,
        "FLEET_SCRIPTED_WORKER_ID": _WORKER,
        "FLEET_SCRIPTED_POOL": POOLS[Stage.VISION_ENCODE],
        "FLEET_SCRIPTED_MODEL": MODEL,
        "FLEET_SCRIPTED_STAGE": Stage.VISION_ENCODE.value,
    }
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "worker.log"
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "fleet_common.testing.scripted_worker"]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield log_path
        finally:
            process.terminate()
            process.wait(20)


async def _apply(url: str) -> None:
    settings = BusSettings.model_validate({"url": url})
    await apply(settings, _SPEC)
    bus = await connect_bus(settings, "bench")
    routing = await bus.kv(subjects.BUCKET_ROUTING)
    await routing.put(subjects.ROUTING_KEY, codec.encode(one_pool_table(locality=read_boot_id())))
    await bus.close()


async def _measure(url: str, namespace: str, log_path: Path) -> tuple[list[float], list[float]]:
    until_s = time.monotonic() + _START_S
    while b"worker_ready" not in await asyncio.to_thread(log_path.read_bytes):
        if time.monotonic() > until_s:
            raise RuntimeError(f"the worker did not start: {await asyncio.to_thread(log_path.read_text)}")
        await asyncio.sleep(0.1)
    bus = await connect_bus(BusSettings.model_validate({"url": url}), "bench")
    store = await open_store(StoreSettings.model_validate({"arena_namespace": namespace}), owner="bench")
    ingress = FakeIngress(bus)
    await ingress.start()
    try:
        hop = _Hop(bus, store)
        await hop.open()
        pairs = [(await hop.once(), await hop.floor()) for _ in range(_NUM_WARM + _NUM_ROUNDS)]
    finally:
        await ingress.stop()
        await store.close()
        await bus.close()
    return [pair[0] for pair in pairs[_NUM_WARM:]], [pair[1] for pair in pairs[_NUM_WARM:]]


class _Hop:
    """Publishes one step and waits for the next one, which it pulls itself."""

    def __init__(self, bus: NatsBus, store: FleetTensorStore) -> None:
        self._bus = bus
        self._store = store
        self._arrived: asyncio.Queue[WorkMessage] = asyncio.Queue()
        self._count = 0

    async def open(self) -> None:
        """Pull from the decode pool, as a decode worker would."""
        realtime = PriorityClass.REALTIME
        pull = await self._bus.pull(Stage.DECODE, POOLS[Stage.DECODE], realtime, "any", self._arrived.put_nowait)
        pull.want(4 * (_NUM_ROUNDS + _NUM_WARM))

    async def once(self) -> float:
        """Seconds from the publish of an encode step to the arrival of the decode step."""
        task = chat_task(now_unix_s=time.time(), num_images=1)
        pixels = await self._store.put(np.zeros((3, 336, 336), np.uint8), ttl_s=60.0, locality=read_boot_id())
        inputs = {"pre": StepOutput(step_id=StepId("pre"), epoch=0, tensors={"pixels0": pixels})}
        encode = task_of(task, task.plan.step(StepId("enc0")), inputs, time.time())
        return await self._send(Stage.VISION_ENCODE, codec.encode(encode), f"{task.request_id}:enc0:0")

    async def floor(self) -> float:
        """Seconds from a publish to the arrival of the same message: what the broker alone costs."""
        self._count += 1
        payload = msgspec.msgpack.encode(b"x" * 1000)
        return await self._send(Stage.DECODE, payload, f"floor:{self._count}")

    async def _send(self, stage: Stage, payload: bytes, message_id: str) -> float:
        subject = subjects.work(stage, POOLS[stage], PriorityClass.REALTIME)
        started_s = time.perf_counter()
        await self._bus.publish_work(subject, payload, message_id=message_id, ttl_s=60.0)
        message = await asyncio.wait_for(self._arrived.get(), 10.0)
        spent_s = time.perf_counter() - started_s
        await message.ack()
        return spent_s
