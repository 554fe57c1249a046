"""`fleet up` with scripted engines: from the first line to the last process gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleet_cli.testing import RunningFleet, running_fleet, stop, wait_for
from fleet_cli.up.leftovers import stack_processes
from fleet_cli.up.rundir import RunDir
from fleet_common.testing.servers import free_port

pytestmark = pytest.mark.e2e

SCRIPTED = {"FLEET_ENGINE": "scripted"}
QUESTION = {
    "model": "omnifleet-vlm",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path / "fleet", SCRIPTED, timeout_s=60.0) as fleet:
        yield fleet


def ask(url: str, body: object = QUESTION) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def what_is_left(run_dir: Path) -> list[str]:
    """Processes and shared memory of a stack; whatever works in its folder counts as its process."""
    folder = RunDir(run_dir)
    segments = [path.name for path in Path("/dev/shm").glob(f"{folder.namespace}*")]
    inside = [str(pid) for pid in pids() if _works_in(pid, folder.path)]
    return [str(pid) for pid in stack_processes(folder.namespace)] + segments + inside


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False


def pid_of(fleet: RunningFleet, name: str) -> int:
    pid: int = fleet.stack()["processes"][name]["pid"]
    return pid


def test_a_stack_answers_and_leaves_nothing_behind(fleet: RunningFleet) -> None:
    text = ask(fleet.url)
    picture = ask(fleet.url, json.loads((fleet.run_dir / "picture.json").read_text()))
    ports = [entry["port"] for entry in fleet.stack()["processes"].values()]

    assert (text.status_code, picture.status_code) == (200, 200)
    assert text.json()["choices"][0]["message"]["content"]
    assert what_is_left(fleet.run_dir) != []

    took_s = stop(fleet.process)

    assert fleet.process.returncode == 0
    assert took_s <= 10.0
    assert what_is_left(fleet.run_dir) == []
    assert not (fleet.run_dir / "stack.json").exists()
    assert [port for port in ports if is_open(port)] == []


def test_status_shows_the_fleet_as_it_is(fleet: RunningFleet) -> None:
    status = fleet.status()

    assert {worker["worker_id"] for worker in status["workers"]} == {"preprocess-0", "vision-0", "decode-0"}
    for worker in status["workers"]:
        assert (worker["state"], worker["has_reported"]) == ("ready", True)
        assert worker["pid"] == pid_of(fleet, worker["worker_id"])
    assert {pool["pool"] for pool in status["pools"]} == {"preprocess-cpu", "vision-cpu", "decode-cpu"}
    assert status["table"]["revision"] >= 1
    assert status["leader"]["pid"] == pid_of(fleet, "placement")
    assert [ingress["url"] for ingress in status["ingresses"]] == [fleet.url]


@pytest.mark.parametrize("name", ["decode-0", "nats-server", "valkey-server", "placement", "ingress"])
def test_a_killed_child_is_started_again_and_the_fleet_serves(fleet: RunningFleet, name: str) -> None:
    before = pid_of(fleet, name)

    os.kill(before, signal.SIGKILL)
    wait_for(lambda: pid_of(fleet, name) not in (before, None), 20.0, f"{name} is started again")
    fleet.wait_ready(40.0)
    wait_for(lambda: ask(fleet.url).status_code == 200, 20.0, "it answers")

    assert f"{name} was killed by signal 9; starting it again in 1 s" in (fleet.run_dir / "up.log").read_text()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_killed_supervisor_takes_its_fleet_along(fleet: RunningFleet) -> None:
    ports = [entry["port"] for entry in fleet.stack()["processes"].values()]
    fleet.process.kill()
    fleet.process.wait()

    wait_for(lambda: what_is_left(fleet.run_dir) == [] and not any(map(is_open, ports)), 10.0, "nothing is left")


def test_a_fleet_goes_when_whoever_tests_it_is_gone(fleet: RunningFleet) -> None:
    assert fleet.process.stdin is not None
    fleet.process.stdin.close()

    assert fleet.process.wait(15.0) == 0
    assert what_is_left(fleet.run_dir) == []


def test_the_next_start_cleans_up_after_a_supervisor_and_its_guardian_were_killed(
    fleet: RunningFleet, tmp_path: Path
) -> None:
    guardians = [pid for pid in pids() if _is_guardian_of(pid, fleet)]
    ports = [entry["port"] for entry in fleet.stack()["processes"].values()]
    for pid in (*guardians, fleet.process.pid):
        os.kill(pid, signal.SIGKILL)
    fleet.process.wait()
    assert what_is_left(fleet.run_dir) != []

    with running_fleet(fleet.run_dir, SCRIPTED, timeout_s=60.0) as second:
        assert "stopped leftover process" in (second.run_dir / "up.log").read_text()
        assert [port for port in ports if is_open(port)] == []
        assert ask(second.url).status_code == 200

    assert what_is_left(fleet.run_dir) == []


def _is_guardian_of(pid: int, fleet: RunningFleet) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"fleet_cli.up.guardian" in words and str(fleet.run_dir).encode() in words


def test_two_stacks_run_side_by_side(fleet: RunningFleet, tmp_path: Path) -> None:
    with running_fleet(tmp_path / "second", SCRIPTED, timeout_s=60.0) as second:
        assert ask(second.url).status_code == 200
        assert fleet.stack()["namespace"] != second.stack()["namespace"]

    assert ask(fleet.url).status_code == 200


def test_a_taken_port_and_a_taken_folder_are_told_in_one_line(fleet: RunningFleet, tmp_path: Path) -> None:
    port = fleet.url.rpartition(":")[2]

    on_port = _up(tmp_path / "other", port)
    in_folder = _up(fleet.run_dir, str(free_port()))

    assert (on_port.returncode, in_folder.returncode) == (1, 1)
    assert "FLEET_HTTP_PORT" in on_port.stderr
    assert "FLEET_RUN_DIR" in in_folder.stderr
    assert "Traceback" not in on_port.stderr + in_folder.stderr
    assert ask(fleet.url).status_code == 200


def _up(run_dir: Path, port: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **SCRIPTED, "FLEET_HTTP_PORT": port}
    command = [sys.executable, "-m", "fleet_cli", "up", "--run-dir", str(run_dir)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def test_ctrl_c_while_it_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "fleet"
    environment = {**os.environ, **SCRIPTED, "FLEET_HTTP_PORT": str(free_port())}
    command = [sys.executable, "-m", "fleet_cli", "up", "--run-dir", str(run_dir)]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: (run_dir / "logs" / "decode-0.log").exists(), 20.0, "services are being started")

    took_s = stop(process)

    assert took_s <= 10.0
    assert what_is_left(run_dir) == []


def test_a_fleet_that_cannot_start_says_why_and_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = {**SCRIPTED, "FLEET_DECODE_SLOTS": "none"}

    with (
        pytest.raises(RuntimeError, match="decode-0 does not start"),
        running_fleet(tmp_path / "fleet", settings, timeout_s=60.0),
    ):
        raise AssertionError

    assert what_is_left(tmp_path / "fleet") == []


def test_bus_apply_finds_nothing_to_change_in_a_running_stack(fleet: RunningFleet) -> None:
    command = [sys.executable, "-m", "fleet_cli", "bus", "apply", "--run-dir", str(fleet.run_dir)]

    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)

    assert answer.stdout == "nothing to change\n"


def test_tap_shows_a_request_as_it_passes(fleet: RunningFleet, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "fleet_cli", "tap", "--json", "--run-dir", str(fleet.run_dir)]
    shown = tmp_path / "tapped"

    def is_seen() -> bool:
        ask(fleet.url)
        return '"finished.v1"' in shown.read_text()

    with shown.open("w") as stream, subprocess.Popen(command, stdout=stream) as tapping:
        try:
            wait_for(is_seen, 60.0, "a request passes by the tap")  # when it has begun to listen, nobody knows
            ask(fleet.url)
            time.sleep(0.5)
            tapping.send_signal(signal.SIGINT)
            assert tapping.wait(20.0) == 0
        finally:
            tapping.kill()
    lines = [json.loads(line) for line in shown.read_text().splitlines()]

    seen = {(line["message"]["type"], line["subject"].split(".")[2]) for line in lines}
    assert {("step_task.v1", "preprocess"), ("step_task.v1", "decode")} <= seen
    assert "finished.v1" in {kind for kind, _ in seen}
