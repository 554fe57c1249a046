"""A real broker, worker processes with scripted engines, and an ingress that follows the protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from fleet_common.bus.apply import apply
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.topology import TopologyLimits
from fleet_common.settings import BusSettings
from fleet_common.testing.fake_ingress import FakeIngress
from fleet_common.testing.plans import MODEL, POOLS, chat_task, one_pool_table
from fleet_common.testing.servers import ServerProcess, nats_server, wait_until_stopped
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec, WorkerInfo
from fleet_contracts.work import StepTask

ACK_WAIT_S = 1.5
WORKERS = tuple(WorkerId(f"{kind}{n}") for kind in ("p", "v", "d") for n in range(2))
SPEC = FleetSpec(pools=tuple(PoolSpec(stage=s, pool=p, model=MODEL, workers=WORKERS) for s, p in POOLS.items()))


async def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Wait until it holds; fails after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.02)


@dataclass
class WorkerProcess:
    """A scripted worker in a process of its own."""

    worker_id: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until_stopped(self.process.pid)

    @property
    def log(self) -> list[dict[str, object]]:
        lines = self.log_path.read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]

    def steps(self) -> list[dict[str, object]]:
        return [line for line in self.log if line["event"] == "step_finished"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


@dataclass
class Fleet:
    """What a test drives."""

    server: ServerProcess
    folder: Path
    bus: NatsBus
    ingress: FakeIngress
    workers: list[WorkerProcess] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    async def worker(self, stage: Stage, worker_id: str, *, wait: bool = True, **settings: object) -> WorkerProcess:
        """Start a worker process; with `wait`, until its engine is ready."""
        environment = {
            **os.environ,
            "FLEET_BUS__URL": self.server.url,
            "FLEET_BUS__PULL_EXPIRES_S": "1",
            "FLEET_STORE__ARENA_NAMESPACE": f"test-{os.getpid()}",
            "FLEET_STORE__ARENA_BYTES": str(16 << 20),
            "FLEET_STORE__SHM_THRESHOLD_BYTES": "16384",
            "FLEET_STORE__REAPER_GRACE_S": "1",
            **self.environment,
            "FLEET_RUNNER__ACK_WAIT_S": str(ACK_WAIT_S),
            "FLEET_RUNNER__HEARTBEAT_S": "0.4",
            "FLEET_RUNNER__CONFIRM_TIMEOUT_S": "1",
            "FLEET_RUNNER__DRAIN_S": "3",
            "FLEET_SCRIPTED_WORKER_ID": worker_id,
            "FLEET_SCRIPTED_POOL": POOLS[stage],
            "FLEET_SCRIPTED_MODEL": MODEL,
            "FLEET_SCRIPTED_STAGE": stage.value,
            **{f"FLEET_SCRIPTED_{name.upper()}": str(value) for name, value in settings.items()},
        }
        log_path = self.folder / f"{worker_id}-{len(self.workers)}.log"
        process = _start(environment, log_path)
        worker = WorkerProcess(worker_id, process, log_path)
        self.workers.append(worker)
        if wait:
            await self.ready(worker)
        return worker

    async def ready(self, *workers: WorkerProcess) -> None:
        """Wait until the engines are loaded."""
        for worker in workers:
            try:
                await eventually(lambda w=worker: any(line["event"] == "worker_ready" for line in w.log))  # type: ignore[misc]
            except AssertionError:
                raise AssertionError(worker.log_path.read_text()[-3000:]) from None

    async def submit(self, *, suffix: str = "", num_images: int = 0, timeout_s: float = 60.0) -> StepTask:
        """One request."""
        now_unix_s = time.time()
        task = chat_task(now_unix_s=now_unix_s, num_images=num_images, timeout_s=timeout_s)
        if suffix:
            task = msgspec.structs.replace(task, request_id=f"{task.request_id}_{suffix}")
        await self.ingress.submit(task, POOLS[Stage.PREPROCESS])
        return task

    async def all_ended(self, tasks: list[StepTask], timeout_s: float = 25.0) -> None:
        """Wait for the end of every request."""
        views = [self.ingress.view(task.request_id) for task in tasks]
        try:
            await eventually(lambda: all(view.ended.is_set() for view in views), timeout_s)
        except AssertionError:
            missing = [task.request_id for task in tasks if not self.ingress.view(task.request_id).ended.is_set()]
            logs = "\n".join(worker.log_path.read_text()[-2500:] for worker in self.workers)
            raise AssertionError(f"{len(missing)} requests did not end: {missing[:3]}\n{logs}") from None

    async def infos(self) -> list[WorkerInfo]:
        """Registered workers."""
        mirror = await (await self.bus.kv(subjects.BUCKET_REGISTRY)).mirror()
        entries = [codec.decode_registry_entry(value) for value in mirror.items().values()]
        await mirror.stop()
        return [entry for entry in entries if isinstance(entry, WorkerInfo)]


def _start(environment: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fleet_common.testing.scripted_worker"]
    with log_path.open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _sweep_arena() -> None:
    for segment in Path("/dev/shm").glob(f"test-{os.getpid()}*"):
        segment.unlink(missing_ok=True)


@pytest.fixture
def broker() -> Iterator[ServerProcess]:
    with nats_server() as server:
        yield server


@pytest.fixture
async def fleet(broker: ServerProcess, tmp_path: Path) -> AsyncIterator[Fleet]:
    settings = BusSettings.model_validate({"url": broker.url})
    await apply(settings, SPEC, TopologyLimits(ack_wait_s=ACK_WAIT_S))
    bus = await connect_bus(settings, "test")
    ingress = FakeIngress(bus)
    await ingress.start()
    routing = await bus.kv(subjects.BUCKET_ROUTING)
    await routing.put(subjects.ROUTING_KEY, codec.encode(one_pool_table(locality="")))
    fleet = Fleet(broker, tmp_path, bus, ingress)
    try:
        yield fleet
    finally:
        for worker in fleet.workers:
            worker.end()
        _sweep_arena()
        await ingress.stop()
        await bus.close()
