"""A decode worker with the real engine: what becomes of vLLM's engine core when something is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from fleet_common.bus.apply import apply
from fleet_common.settings import BusSettings
from fleet_common.testing.servers import ServerProcess, nats_server
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec
from fleet_decode.engine.environment import decode_environment
from fleet_models.smollm2 import prepare_smollm2

pytestmark = [pytest.mark.e2e, pytest.mark.models]

READY_S = 180.0


class Worker:
    """One `python -m fleet_decode`."""

    def __init__(self, server: ServerProcess, model: Path, log_path: Path) -> None:
        self.log_path = log_path
        environment = {
            **os.environ,
            **decode_environment(str(model), threads=1, kv_cache_gib=1),
            "FLEET_BUS__URL": server.url,
            "FLEET_STORE__ARENA_NAMESPACE": f"test-decode-{os.getpid()}",
            "FLEET_STORE__ARENA_BYTES": str(1 << 20),
            "FLEET_DECODE_WORKER_ID": "d0",
            "FLEET_DECODE_POOL": "decode-test",
            "FLEET_DECODE_MODEL": "m",
            "FLEET_DECODE_MODEL_PATH": str(model),
            "FLEET_DECODE_SLOTS": "2",
            "FLEET_DECODE_ENGINE_ARGS": '{"max_model_len": 1024}',
        }
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "fleet_decode"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine_core(self) -> psutil.Process | None:
        for child in self.children():
            if "EngineCore" in " ".join([child.name(), *child.cmdline()]):
                return child
        return None

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text()[-3000:]
        return "worker_ready" in self.log_path.read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = Path(os.environ.get("FLEET_TEST_MODELS", str(tmp_path_factory.mktemp("models"))))
    return prepare_smollm2(cache, lambda _: None)


@pytest.fixture
async def worker(model: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    pools = tuple(
        PoolSpec(stage=stage, pool=f"{stage.value.split('_')[0]}-test", model="m", workers=(WorkerId("d0"),))
        for stage in (Stage.PREPROCESS, Stage.VISION_ENCODE, Stage.DECODE)
    )
    with nats_server() as server:
        await apply(BusSettings(url=server.url), FleetSpec(pools=pools))
        started = Worker(server, model, tmp_path / "worker.log")
        try:
            yield started
        finally:
            for process in started.children() if started.process.poll() is None else ():
                process.kill()
            started.process.kill()
            started.process.wait(10)


def until(condition: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.1)


def are_gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_a_worker_told_to_stop_while_it_loads_leaves_nothing_behind(worker: Worker) -> None:
    until(lambda: worker.engine_core() is not None, READY_S)
    children = worker.children()

    worker.process.send_signal(signal.SIGTERM)

    assert worker.process.wait(10) == 0
    until(lambda: are_gone(children), 5)


async def test_a_killed_worker_takes_its_engine_core_with_it(worker: Worker) -> None:
    until(worker.is_ready, READY_S)
    children = worker.children()

    worker.process.kill()

    worker.process.wait(10)
    until(lambda: are_gone(children), 5)


async def test_a_worker_is_stalled_while_its_idle_engine_core_hangs_and_leaves_when_it_is_killed(
    worker: Worker,
) -> None:
    until(worker.is_ready, READY_S)
    core = worker.engine_core()
    assert core is not None

    core.suspend()
    until(lambda: '"state": "stalled", "was": "ready"' in worker.log_path.read_text(), 20)
    core.resume()
    until(lambda: '"state": "ready", "was": "stalled"' in worker.log_path.read_text(), 20)
    core.kill()

    assert worker.process.wait(15) == 1
    assert "EngineDeadError" in worker.log_path.read_text()
