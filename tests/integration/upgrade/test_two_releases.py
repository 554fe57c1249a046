"""The former release and this one in one fleet, as processes on a real broker and a real store.

Every stage has a worker of each release in one pool, and there is an ingress of each: whoever takes a request, it ends
once, with the same answer. Then one release's workers are killed in the middle, either way round.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from fleet_cli.connect import Target
from fleet_cli.status import read_status
from fleet_cli.up.example import red_circle_png
from fleet_common.bus.apply import apply
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, render
from fleet_common.settings import BusSettings
from fleet_common.testing.servers import nats_server, valkey_server
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec
from tests.integration.ingress.conftest import FleetProcesses
from tests.support.releases import FORMER, unpack

pytestmark = pytest.mark.integration

CHAT_MODEL, EMBEDDING_MODEL = "chat", "emb"
SERVICES = {Stage.PREPROCESS: "preprocess", Stage.VISION_ENCODE: "vision", Stage.DECODE: "decode"}
#: A stream of this many tokens outlasts what the tests do in its middle.
NUM_TOKENS, TOKEN_DELAY_S = 60, 0.05
_DECODE_ARGS = json.dumps({"token_delay_s": TOKEN_DELAY_S, "hidden_size": 64, "image_tokens": 16})
_READY_S = 60.0
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
PICTURE = "data:image/png;base64," + base64.b64encode(red_circle_png()).decode()


def pool_of(stage: Stage, model: str) -> str:
    return f"{SERVICES[stage]}-{model}"


def worker_of(stage: Stage, model: str, release: str) -> str:
    return f"{pool_of(stage, model)}-{release}"


@dataclass
class MixedFleet:
    """Processes of both releases; `workers` by name."""

    target: Target
    old: FleetProcesses
    new: FleetProcesses
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_worker(self, stage: Stage, release: str, model: str = CHAT_MODEL) -> None:
        """Start the one worker of a release at a stage of a model."""
        settings: dict[str, object] = {
            "worker_id": worker_of(stage, model, release),
            "pool": pool_of(stage, model),
            "model": model,
            "engine": "scripted",
        }
        if model == EMBEDDING_MODEL and stage is Stage.DECODE:
            settings["runner"] = "embed"
        elif stage is Stage.DECODE:
            settings |= {"slots": 16, "engine_args": _DECODE_ARGS}
        processes = self.old if release == "old" else self.new
        self.workers[str(settings["worker_id"])] = processes.start(SERVICES[stage], Role.WORKER, **settings)

    def kill(self, worker: str) -> None:
        self.workers[worker].send_signal(signal.SIGKILL)
        self.workers[worker].wait()

    async def status(self) -> dict[str, dict[str, Any]]:
        """Workers by name, as `fleet status` has them."""
        return {worker["worker_id"]: worker for worker in (await read_status(self.target))["workers"]}

    async def wait_ready(self, *names: str) -> None:
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            workers = await self.status()
            if all(workers.get(name, {}).get("state") == "ready" for name in names):
                return
            await asyncio.sleep(0.2)
        raise AssertionError("\n".join(path.read_text()[-1500:] for path in self.new.folder.parent.rglob("*.log")))

    @property
    def urls(self) -> list[str]:
        """The old ingress, the new one."""
        return [*self.old.urls, *self.new.urls]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedFleet]:
    folder = tmp_path_factory.mktemp("upgrade")
    release = unpack(tmp_path_factory.mktemp("former"))
    password = "secret-of-the-test"
    passwords = Passwords(work=dict.fromkeys(Role, password), control=dict.fromkeys(Role, password))

    def config(port: int, store_dir: Path) -> str:
        return render(ServerOptions(port=port, store_dir=store_dir), passwords)

    with nats_server(config) as broker, valkey_server() as store:
        admin = BusSettings(
            url=broker.url,
            user=Role.ADMIN.value,
            work_password=SecretStr(password),
            control_password=SecretStr(password),
        )
        asyncio.run(apply(admin, _spec()))
        environment = {
            **os.environ,
            "FLEET_BUS__URL": broker.url,
            "FLEET_STORE__REDIS_URL": store.url,
            "FLEET_STORE__ARENA_NAMESPACE": f"test-upgrade-{os.getpid()}",
            "FLEET_STORE__ARENA_BYTES": str(16 << 20),
        }
        sides = []
        for name, more in (("old", {"PYTHONPATH": release.python_path}), ("new", {})):
            (folder / name).mkdir()
            sides.append(FleetProcesses({**environment, **more}, folder / name, password))
        mixed = MixedFleet(Target(bus=admin, url=""), *sides)
        try:
            _start_all(mixed)
            yield mixed
        finally:
            mixed.old.stop()
            mixed.new.stop()


def _spec() -> FleetSpec:
    return FleetSpec(
        pools=tuple(
            PoolSpec(
                stage=stage,
                pool=pool_of(stage, model),
                model=model,
                workers=tuple(WorkerId(worker_of(stage, model, release)) for release in ("old", "new")),
            )
            for model in (CHAT_MODEL, EMBEDDING_MODEL)
            for stage in SERVICES
        )
    )


def _start_all(mixed: MixedFleet) -> None:
    # An upgrade begins with placement.
    mixed.new.start("placement", Role.PLACEMENT)
    for release in ("old", "new"):
        for stage in SERVICES:
            mixed.start_worker(stage, release)
    for stage in (Stage.PREPROCESS, Stage.DECODE):
        mixed.start_worker(stage, "new", EMBEDDING_MODEL)
    mixed.old.start_ingress()
    mixed.new.start_ingress()
    asyncio.run(mixed.wait_ready(*mixed.workers))


def body(number: int, *, picture: bool = False, **fields: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": f"question {number}"}]
    if picture:
        content.append({"type": "image_url", "image_url": {"url": PICTURE}})
    return {"model": CHAT_MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


async def answer(http: httpx.AsyncClient, url: str, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Text, and the timeline."""
    made = await http.post(url + CHAT, json=request)
    assert made.status_code == 200, made.text
    report = (await http.get(f"{url}/v1/requests/{made.headers['x-fleet-request-id']}")).json()
    assert report["status"] == "finished"
    text: str = made.json()["choices"][0]["message"]["content"]
    return text, report


async def streamed(http: httpx.AsyncClient, url: str, request: dict[str, Any]) -> str:
    """The text of a stream that came to its end; half-way the caller may do harm."""
    text, is_whole = "", False
    async with http.stream("POST", url + CHAT, json={**request, "stream": True}) as made:
        assert made.status_code == 200
        async for line in made.aiter_lines():
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content", "")
    assert is_whole
    return text


async def test_the_release_of_every_worker_is_shown(fleet: MixedFleet) -> None:
    releases = {name: worker["release"] for name, worker in (await fleet.status()).items()}

    old = {name for name, release in releases.items() if release == FORMER}
    assert old == {worker_of(stage, CHAT_MODEL, "old") for stage in SERVICES}
    assert "" not in releases.values()


@pytest.mark.parametrize("picture", [False, True])
async def test_a_request_ends_alike_whichever_release_takes_which_step(fleet: MixedFleet, picture: bool) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        rounds = [
            await asyncio.gather(*(answer(http, url, body(number, picture=picture)) for number in range(12)))
            for url in (*fleet.urls, *fleet.urls)
        ]

    texts = [[text for text, _ in made] for made in rounds]
    assert all(made == texts[0] for made in texts)
    assert len(set(texts[0])) > 1
    for made in (rounds[0] + rounds[2], rounds[1] + rounds[3]):
        workers = {step["worker"] for _, report in made for step in report["steps"]}
        stages = SERVICES if picture else (Stage.PREPROCESS, Stage.DECODE)
        assert workers == {worker_of(stage, CHAT_MODEL, release) for stage in stages for release in ("old", "new")}


@pytest.mark.parametrize("leaves", ["old", "new"])
async def test_streams_go_on_at_the_other_release_when_a_worker_is_killed(fleet: MixedFleet, leaves: str) -> None:
    requests = [body(number, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0) for number in range(8)]
    victim = worker_of(Stage.DECODE, CHAT_MODEL, leaves)
    async with httpx.AsyncClient(timeout=90) as http:
        undisturbed = await asyncio.gather(*(streamed(http, fleet.urls[1], request) for request in requests))
        going = [
            asyncio.create_task(streamed(http, fleet.urls[number % 2], request))
            for number, request in enumerate(requests)
        ]
        await asyncio.sleep(NUM_TOKENS * TOKEN_DELAY_S / 2)
        was_running = (await fleet.status())[victim]["in_flight"]
        fleet.kill(victim)
        texts = await asyncio.gather(*going)

    assert was_running > 0
    assert texts == undisturbed
    fleet.start_worker(Stage.DECODE, leaves)
    await fleet.wait_ready(victim)


async def test_embeddings_come_from_the_release_that_knows_them(fleet: MixedFleet) -> None:
    request = {"model": EMBEDDING_MODEL, "input": ["a", "b"]}
    async with httpx.AsyncClient(timeout=30) as http:
        old, new = [await http.post(url + EMBEDDINGS, json=request) for url in fleet.urls]
        chats = [await http.post(url + CHAT, json={**body(1), "model": EMBEDDING_MODEL}) for url in fleet.urls]

    assert old.status_code == 404
    assert (new.status_code, len(new.json()["data"])) == (200, 2)
    assert [chat.status_code for chat in chats] == [400, 400]


async def test_work_an_old_worker_cannot_read_never_reaches_it(fleet: MixedFleet) -> None:
    stranger = worker_of(Stage.PREPROCESS, EMBEDDING_MODEL, "old")
    request = {"model": EMBEDDING_MODEL, "input": "a"}
    async with httpx.AsyncClient(timeout=30) as http:
        fleet.start_worker(Stage.PREPROCESS, "old", EMBEDDING_MODEL)
        await fleet.wait_ready(stranger)
        refused = await http.post(fleet.urls[1] + EMBEDDINGS, json=request)
        chat, _ = await answer(http, fleet.urls[1], body(1))
        fleet.kill(stranger)
        deadline_s = time.monotonic() + _READY_S
        served = refused
        while served.status_code == 503 and time.monotonic() < deadline_s:
            await asyncio.sleep(0.2)
            with contextlib.suppress(httpx.TransportError):
                served = await http.post(fleet.urls[1] + EMBEDDINGS, json=request)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_unavailable")
    assert chat
    assert served.status_code == 200
