"""`fleet up --connector NAME`: tensors of a whole scripted fleet go through that store, and nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from fleet_cli.testing import RunningFleet, running_fleet, stop, wait_for
from fleet_cli.up.leftovers import stack_processes
from fleet_cli.up.rundir import RunDir

pytestmark = pytest.mark.e2e

QUESTION = {
    "model": "omnifleet-vlm",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
}
SERVERS = {
    "redis": {"valkey-server"},
    "mooncake": {"mooncake-master", "mooncake-node"},
    "yuanrong": {"yuanrong-worker"},
}


@pytest.mark.parametrize("connector", ["mooncake", "yuanrong"])
def test_text_and_pictures_are_answered_through_the_connector(connector: str, tmp_path: Path) -> None:
    settings = {"FLEET_ENGINE": "scripted", "FLEET_STORE__ARENA_BYTES": "0"}
    with running_fleet(tmp_path / "fleet", settings, timeout_s=90.0, options=("--connector", connector)) as fleet:
        picture = json.loads((fleet.run_dir / "picture.json").read_text())

        answers = [ask(fleet, body) for body in (QUESTION, picture, picture)]

        running = set(fleet.stack()["processes"])
        moved = moved_tensors(fleet, connector)
        took_s = stop(fleet.process)

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert all(answer.json()["choices"][0]["message"]["content"] for answer in answers)
    assert running & set().union(*SERVERS.values()) == SERVERS[connector]
    assert moved >= 2
    assert took_s <= 10.0
    folder = RunDir(fleet.run_dir)
    assert stack_processes(folder.namespace) == []
    assert not folder.socket_dir.exists()


@pytest.mark.parametrize(
    ("connector", "name"),
    [("mooncake", "mooncake-master"), ("mooncake", "mooncake-node"), ("yuanrong", "yuanrong-worker")],
)
def test_a_killed_store_server_is_started_again_and_the_fleet_serves(connector: str, name: str, tmp_path: Path) -> None:
    settings = {"FLEET_ENGINE": "scripted", "FLEET_STORE__ARENA_BYTES": "0"}
    with running_fleet(tmp_path / "fleet", settings, timeout_s=90.0, options=("--connector", connector)) as fleet:
        picture = json.loads((fleet.run_dir / "picture.json").read_text())
        assert ask(fleet, picture).status_code == 200
        before = fleet.stack()["processes"][name]["pid"]

        os.kill(before, signal.SIGKILL)
        wait_for(lambda: fleet.stack()["processes"][name]["pid"] not in (before, None), 20.0, f"{name} is back")

        wait_for(lambda: ask(fleet, picture).status_code == 200, 40.0, "it answers")


def ask(fleet: RunningFleet, body: object) -> httpx.Response:
    return httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)


def moved_tensors(fleet: RunningFleet, connector: str) -> int:
    """Tensors that the vision worker has read from the connector and put into it, by its own count."""

    def count() -> int:
        port = fleet.stack()["processes"]["vision-0"]["port"]
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
        pattern = rf'fleet_tensor_store_operations{{connector="{connector}",operation="(put|get)"}} ([\d.]+)'
        return sum(int(float(value)) for _, value in re.findall(pattern, metrics))

    # Its figures are a second old.
    wait_for(lambda: count() >= 2, 5.0, "the vision worker has moved tensors")
    return count()
