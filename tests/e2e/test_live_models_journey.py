"""Models and adapters come and go on a fleet that serves, with scripted engines: nobody else notices."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet_cli.testing import RunningFleet, running_fleet, wait_for
from fleet_cli.up.rundir import RunDir

pytestmark = pytest.mark.e2e

FIRST, SECOND = "omnifleet-vlm", "org/second-1.5"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("live") / "fleet", {"FLEET_ENGINE": "scripted"}, timeout_s=90) as fleet:
        yield fleet


def ask(fleet: RunningFleet, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **more}
    return httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def listed(fleet: RunningFleet) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in httpx.get(f"{fleet.url}/v1/models", timeout=10).json()["data"]}


def in_status(fleet: RunningFleet, model: str) -> dict[str, Any] | None:
    return next((entry for entry in fleet.status()["models"] if entry["model"] == model), None)


@dataclass
class Load:
    """What became of the requests that were sent all the while."""

    statuses: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)


@contextmanager
def load_on(fleet: RunningFleet, model: str) -> Iterator[Load]:
    """Two clients ask one model again and again, and a load balancer asks whether the ingress is ready."""
    load, stopping = Load(), threading.Event()
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}

    def requests() -> None:
        with httpx.Client(base_url=fleet.url, timeout=60) as client:
            while not stopping.wait(0.02):
                load.statuses.append(client.post("/v1/chat/completions", json=body).status_code)

    def readiness() -> None:
        with httpx.Client(base_url=fleet.url, timeout=10) as client:
            while not stopping.wait(0.2):
                load.ready.append(client.get("/health/ready").status_code)

    threads = [threading.Thread(target=work) for work in (requests, requests, readiness)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def undisturbed(load: Load) -> bool:
    return len(load.statuses) > 20 and set(load.statuses) == {200} and set(load.ready) == {200}


def left_of(fleet: RunningFleet, before: dict[str, Any]) -> list[str]:
    """Workers, queues, processes, routes and shared memory that were not there before."""
    now = snapshot(fleet)
    return [f"{kind} {name}" for kind, names in now.items() for name in sorted(names - before[kind])]


def snapshot(fleet: RunningFleet) -> dict[str, set[str]]:
    status = fleet.status()
    namespace = RunDir(fleet.run_dir).namespace
    return {
        "worker": {worker["worker_id"] for worker in status["workers"]},
        "queue": {pool["pool"] for pool in status["pools"]},
        "route": {route["model"] for route in status["table"]["routes"]},
        "process": set(fleet.stack()["processes"]),
        "segment": {path.name for path in Path("/dev/shm").glob(f"{namespace}*")},
        "adapters": {path.name for path in (fleet.run_dir / "adapters").iterdir()},
    }


def test_a_second_model_is_served_and_unserved_while_the_first_one_works(fleet: RunningFleet) -> None:
    before = snapshot(fleet)

    with load_on(fleet, FIRST) as load:
        served = fleet.command("serve", SECOND)
        answer = ask(fleet, SECOND)
        picture = json.loads((fleet.run_dir / "picture.json").read_text())
        seen = httpx.post(f"{fleet.url}/v1/chat/completions", json={**picture, "model": SECOND}, timeout=60)
        both = listed(fleet)
        unserved = fleet.command("unserve", SECOND)
        after = ask(fleet, SECOND)

    assert served.returncode == 0, served.stderr
    assert f"{SECOND} is ready" in served.stdout
    assert (answer.status_code, answer.json()["model"], seen.status_code) == (200, SECOND, 200)
    assert (both[FIRST]["state"], both[SECOND]["state"]) == ("ready", "ready")
    assert unserved.returncode == 0, unserved.stderr
    assert (after.status_code, after.json()["error"]["code"]) == (404, "model_not_found")
    assert in_status(fleet, SECOND) is None
    assert undisturbed(load), load
    wait_for(lambda: left_of(fleet, before) == [], 20.0, "nothing of the second model is left")


def test_workers_of_one_model_never_see_work_of_another(fleet: RunningFleet) -> None:
    fleet.command("serve", SECOND)
    of_second = {w["worker_id"]: w["completed_total"] for w in fleet.status()["workers"] if "second" in w["pool"]}

    for _ in range(10):
        assert ask(fleet, FIRST).status_code == 200
    workers = {worker["worker_id"]: worker["completed_total"] for worker in fleet.status()["workers"]}
    fleet.command("unserve", SECOND)

    assert len(of_second) == 3
    assert {name: workers[name] for name in of_second} == of_second


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("bad", "--stage-args", 'decode={"nonsense":1}'), "nonsense"),
        (("bad", "--stage-args", 'decode={"fail_to_load":"unknown model type"}'), "unknown model type"),
        (("/no/such/folder", "--name", "bad"), "is no folder"),
        (("bad", "--replicas", "audio_speak=1"), "no stage audio_speak"),
    ],
    ids=["bad-argument", "engine-refuses", "missing-folder", "no-such-stage"],
)
def test_a_load_that_fails_is_reported_and_disturbs_nobody(
    fleet: RunningFleet, words: tuple[str, ...], why: str
) -> None:
    before = snapshot(fleet)

    with load_on(fleet, FIRST) as load:
        served = fleet.command("serve", *words)
        answer = ask(fleet, "bad")
        entry = listed(fleet)["bad"]
        status = in_status(fleet, "bad")
        time.sleep(1.0)

    assert served.returncode == 1
    assert why in served.stderr
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
    assert (entry["state"], why in entry["error"], "/" in entry["error"].partition("For further")[0]) == (
        "failed",
        True,
        False,
    )
    assert status is not None
    assert (status["state"], why in status["error"]) == ("failed", True)
    assert undisturbed(load), load
    wait_for(lambda: left_of(fleet, before) == [], 20.0, "nothing of the failed model is left")
    assert fleet.command("unserve", "bad").returncode == 0
    assert "bad" not in listed(fleet)


def test_a_worker_killed_while_it_loads_is_started_again_until_it_is_hopeless(fleet: RunningFleet) -> None:
    name = "slow"
    outcome: list[int] = []
    arguments = ("serve", name, "--stage-args", 'decode={"load_s":60}')
    serving = threading.Thread(target=lambda: outcome.append(fleet.command(*arguments).returncode))
    killed: set[int] = set()

    def decoder() -> int | None:
        processes = fleet.stack()["processes"]
        return next((p["pid"] for child, p in processes.items() if child.startswith("decode-slow")), None)

    with load_on(fleet, FIRST) as load:
        serving.start()
        wait_for(lambda: decoder() is not None, 20.0, "the worker is started")
        loading = (listed(fleet)[name]["state"], ask(fleet, name))
        while serving.is_alive():
            pid = decoder()
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        serving.join()

    state, refused = loading
    assert (state, refused.status_code, refused.json()["error"]["code"]) == ("loading", 503, "model_loading")
    assert "retry-after" in refused.headers
    assert outcome == [1]
    assert len(killed) == 3
    entry = listed(fleet)[name]
    assert (entry["state"], "killed by signal 9" in entry["error"]) == ("failed", True)
    assert undisturbed(load), load
    fleet.command("unserve", name)


def test_requests_in_flight_end_while_their_model_is_unserved(fleet: RunningFleet) -> None:
    slow = 'decode={"token_delay_s":0.1,"num_tokens":64}'
    assert fleet.command("serve", SECOND, "--stage-args", slow).returncode == 0
    answers: list[httpx.Response] = []

    def long_request() -> None:
        answers.append(ask(fleet, SECOND, max_tokens=40))

    threads = [threading.Thread(target=long_request) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)

    unserved = fleet.command("unserve", SECOND)
    for thread in threads:
        thread.join()

    assert unserved.returncode == 0
    assert [answer.status_code for answer in answers] == [200] * 6
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {40}
    assert ask(fleet, SECOND).status_code == 404


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[str], str]:
    """NAME=FOLDER of an adapter that scripted engines take."""

    def make(name: str, rank: int = 8) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (folder / "adapter_model.safetensors").write_bytes(b"")
        return f"{name}={folder}"

    return make


def test_adapters_come_to_a_live_model_by_name_and_stay_where_they_were_used(
    fleet: RunningFleet, adapter: Callable[..., str]
) -> None:
    served = fleet.command("serve", SECOND, "--adapter", adapter("pirate"), "--replicas", "decode=2")
    added = fleet.command("serve", "--on", SECOND, "--adapter", adapter("poet"))
    refused = fleet.command("serve", "--on", SECOND, "--adapter", adapter("giant", 64))
    unable = fleet.command("serve", "--on", FIRST, "--adapter", adapter("lost"))
    answers = {name: text(ask(fleet, name)) for name in (SECOND, "pirate", "poet")}
    # Workers tell what they hold once a second.
    time.sleep(2.5)
    before = {w["worker_id"]: w["completed_total"] for w in fleet.workers("decode")}
    for _ in range(12):
        assert text(ask(fleet, "pirate")) == answers["pirate"]
    time.sleep(1.5)
    after = {w["worker_id"]: w["completed_total"] for w in fleet.workers("decode")}
    models = listed(fleet)
    removed = fleet.command("unserve", "pirate")
    gone = ask(fleet, "pirate")
    still = ask(fleet, "poet")
    fleet.command("unserve", SECOND)

    assert (served.returncode, added.returncode) == (0, 0), (served.stderr, added.stderr)
    assert (refused.returncode, "rank 64" in refused.stderr) == (1, True)
    assert (unable.returncode, "--lora" in unable.stderr) == (1, True)
    assert len(set(answers.values())) == 3
    assert (models["pirate"]["parent"], models["poet"]["parent"]) == (SECOND, SECOND)
    assert sorted(after[name] - before[name] for name in after if "second" in name) == [0, 12]
    assert (removed.returncode, gone.status_code, still.status_code) == (0, 404, 200)
