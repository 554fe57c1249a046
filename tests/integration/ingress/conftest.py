"""Ingresses as processes on a real broker with accounts, and workers with scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from fleet_common.bus.apply import apply
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, render
from fleet_common.settings import BusSettings
from fleet_common.testing.servers import free_port, nats_server
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec

MODEL = "scripted"
POOLS = {Stage.PREPROCESS: "pre-p", Stage.VISION_ENCODE: "vis-p", Stage.DECODE: "dec-p"}
DECODE_SLOTS = 4
#: A token takes this long: two slots' worth of long answers outlast a test unless they are cancelled.
TOKEN_DELAY_S = 0.02

_SPEC = FleetSpec(
    pools=tuple(PoolSpec(stage=s, pool=p, model=MODEL, workers=(WorkerId(f"{p}-0"),)) for s, p in POOLS.items())
)
_READY_S = 60.0
_STOP_S = 15.0


@dataclass
class FleetProcesses:
    """A whole fleet; `ingresses` answer on `urls`."""

    environment: dict[str, str]
    folder: Path
    password: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ingresses: list[subprocess.Popen[bytes]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def start(self, service: str, role: Role, **settings: object) -> subprocess.Popen[bytes]:
        """Start a service as a role of the broker."""
        environment = {
            **self.environment,
            "FLEET_BUS__USER": role.value,
            "FLEET_BUS__WORK_PASSWORD": self.password,
            "FLEET_BUS__CONTROL_PASSWORD": self.password,
            **{f"FLEET_{service.upper()}_{key.upper()}": str(value) for key, value in settings.items()},
        }
        with (self.folder / f"{service}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"fleet_{service}"], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def start_ingress(self, **settings: object) -> str:
        """Start an ingress and wait until it is ready; returns its URL."""
        port = free_port()
        self.ingresses.append(self.start("ingress", Role.INGRESS, http_port=port, **settings))
        url = f"http://127.0.0.1:{port}"
        self.urls.append(url)
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    return url
            time.sleep(0.1)
        raise AssertionError("\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log")))

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what stays."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcesses]:
    """Workers of all three stages, placement, and two ingresses."""
    folder = tmp_path_factory.mktemp("fleet")
    password = "secret-of-the-test"
    passwords = Passwords(work=dict.fromkeys(Role, password), control=dict.fromkeys(Role, password))

    def config(port: int, store_dir: Path) -> str:
        return render(ServerOptions(port=port, store_dir=store_dir), passwords)

    with nats_server(config) as server:
        admin = BusSettings(
            url=server.url,
            user=Role.ADMIN.value,
            work_password=SecretStr(password),
            control_password=SecretStr(password),
        )
        asyncio.run(apply(admin, _SPEC))
        environment = {
            **os.environ,
            "FLEET_BUS__URL": server.url,
            "FLEET_STORE__ARENA_NAMESPACE": f"test-ingress-{os.getpid()}",
            "FLEET_STORE__ARENA_BYTES": str(16 << 20),
        }
        processes = FleetProcesses(environment, folder, password)
        try:
            _start_all(processes)
            yield processes
        finally:
            processes.stop()


def _start_all(processes: FleetProcesses) -> None:
    processes.start("placement", Role.PLACEMENT)
    engine_args = {"token_delay_s": TOKEN_DELAY_S, "hidden_size": 64, "image_tokens": 64}
    for stage, service in ((Stage.PREPROCESS, "preprocess"), (Stage.VISION_ENCODE, "vision"), (Stage.DECODE, "decode")):
        pool = POOLS[stage]
        common = {"worker_id": f"{pool}-0", "pool": pool, "model": MODEL, "engine": "scripted"}
        if stage is Stage.DECODE:
            common |= {"slots": str(DECODE_SLOTS), "engine_args": json.dumps(engine_args)}
        processes.start(service, Role.WORKER, **common)
    for _ in range(2):
        processes.start_ingress()
