"""Dying workers, lost events, leaving clients, full queues, a broker that is out, a drain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fleet_common.bus.memory_work import WorkLimits
from fleet_common.clock import SystemClock
from fleet_contracts import codec, subjects
from fleet_contracts.events import RequestEvent, Token
from fleet_ingress.lifecycle import drain, prepare_ingress
from fleet_ingress.testing import IMAGE_MODEL, TEXT_MODEL, FaultError, IngressRig, Script, eventually, open_rig
from fleet_ingress.testing.rig import served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}]}
LETTERS = tuple(letter.encode() for letter in "abcdefgh")


class Gate:
    """Lets a scripted worker reach a token and then holds it there."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self, index: int) -> None:
        if index == self.at:
            self.reached.set()
            await self.opened.wait()


async def _read_stream(http: httpx.AsyncClient, body: dict[str, Any] = BODY) -> str:
    """Text of a stream, and that it ended well."""
    answer = await http.post(CHAT, json={**body, "stream": True})
    assert answer.content.endswith(b"data: [DONE]\n\n"), answer.text
    events = [json.loads(block[6:]) for block in answer.content.split(b"\n\n") if block.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def test_stream_goes_on_without_a_seam_when_the_worker_dies() -> None:
    deaths = iter([3, 5])

    async def die(index: int) -> None:
        nonlocal next_death
        if index == next_death:
            next_death = next(deaths, None)
            raise FaultError

    next_death: int | None = next(deaths)
    script = Script(pieces=LETTERS, before_token=die)
    async with (
        open_rig(lambda _body: script, WorkLimits(ack_wait_s=0.2)) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=20) as http,
    ):
        text = await _read_stream(http)
        report = (await http.get(f"/v1/requests/{rig.fleet.tasks[0].request_id}")).json()

    assert text == "abcdefgh"
    rows = [(row["step"], row["delivery"]) for row in report["steps"]]
    assert rows == [("pre", 1), ("dec", 1), ("dec", 2), ("dec", 3)]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_lost_events_are_sent_again_before_the_end(is_stream: bool) -> None:
    lost: set[int] = set()

    def lose(event: RequestEvent) -> bool:
        if isinstance(event, Token) and event.index in (2, 7) and event.index not in lost:
            lost.add(event.index)
            return True
        return False

    async with open_rig(lambda _body: Script(pieces=LETTERS)) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        rig.fleet.lose = lose
        if is_stream:
            text = await _read_stream(http)
        else:
            text = (await http.post(CHAT, json=BODY)).json()["choices"][0]["message"]["content"]

    assert {2, 7} == lost
    assert text == "abcdefgh"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_work_stops_when_the_client_leaves(is_stream: bool) -> None:
    gate = Gate(at=2)
    async with (
        open_rig(lambda _body: Script(pieces=LETTERS, before_token=gate)) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        request = asyncio.create_task(_leave_on(gate.reached, http, is_stream))
        await request
        await eventually(lambda: bool(rig.fleet.cancelled), timeout_s=1.0)
        gate.opened.set()
        await eventually(lambda: rig.fleet.num_running == 0)
        tombstones = await rig.broker.connect().kv(subjects.BUCKET_TOMBSTONES)
        tombstone = await tombstones.get(rig.fleet.tasks[0].request_id)

    assert {rig.fleet.tasks[0].request_id} == rig.fleet.cancelled
    assert tombstone is not None
    assert codec.decode_cancel(tombstone.value).reason == "client_left"
    assert rig.ingress.gate.num_inflight == 0


async def _leave_on(reached: asyncio.Event, http: httpx.AsyncClient, is_stream: bool) -> None:
    """Ask, and hang up once the worker is in the middle of it."""
    asking = asyncio.create_task(_ask(http, {**BODY, "stream": is_stream}))
    await reached.wait()
    asking.cancel()
    await asyncio.wait([asking])


async def _ask(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", CHAT, json=body) as answer:
        async for _chunk in answer.aiter_bytes():
            pass


async def test_deadline_is_504_and_cancels() -> None:
    gate = Gate(at=0)
    async with open_rig(lambda _body: Script(before_token=gate)) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answer = await http.post(CHAT, json=BODY, headers={"x-fleet-timeout-s": "0.3"})
        await eventually(lambda: bool(rig.fleet.cancelled))
        gate.opened.set()
        refused = await http.post(CHAT, json=BODY, headers={"x-fleet-timeout-s": "1e9"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "retry-after" in answer.headers
    assert refused.status_code == 400


async def test_silent_worker_leads_to_a_resubmission_that_ends_well() -> None:
    hangs = iter([True])
    hung = asyncio.Event()

    async def hang_once(index: int) -> None:
        if index == 3 and next(hangs, False):
            await hung.wait()

    script = Script(pieces=LETTERS, before_token=hang_once)
    async with open_rig(lambda _body: script, resubmit_after_s=0.3) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        text = await _read_stream(http)
        hung.set()
        await eventually(lambda: "gone" in rig.fleet.statuses)

    assert text == "abcdefgh"
    assert [task.epoch for task in rig.fleet.tasks] == [0, 1 << 20]
    assert rig.fleet.statuses == ["accepted", "gone"]


async def test_full_queue_is_429_and_nothing_is_left_behind() -> None:
    async with open_rig(limits=WorkLimits(max_msgs=0)) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answer = await http.post(CHAT, json={**BODY, "user": "x" * 5000})

    assert answer.status_code == 429
    assert "retry-after" in answer.headers
    assert rig.ingress.dispatcher.live == {}
    assert rig.store.stats()["memory"].num_tensors == 0


async def test_store_without_room_is_waited_for_and_then_503() -> None:
    big = {**BODY, "user": "x" * 5000}
    gate = Gate(at=0)
    script = Script(before_token=gate)
    async with (
        open_rig(lambda _body: script, store_bytes=8000, publish_timeout_s=0.3) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        first = asyncio.create_task(http.post(CHAT, json=big))
        await gate.reached.wait()
        refused = await http.post(CHAT, json=big)
        second = asyncio.create_task(http.post(CHAT, json=big))
        gate.opened.set()
        answers = [await first, await second]

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "tensor_store_full")
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_broker_out_is_503_and_a_running_stream_survives_it() -> None:
    gate = Gate(at=4)
    script = Script(pieces=LETTERS, before_token=gate)
    async with (
        open_rig(lambda _body: script, publish_timeout_s=0.2) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=20) as http,
    ):
        running = asyncio.create_task(_read_stream(http))
        await gate.reached.wait()
        rig.broker.go_down()
        refused = await http.post(CHAT, json=BODY)
        ready = await http.get("/health/ready")
        await rig.broker.come_back()
        gate.opened.set()
        text = await running

    assert (refused.status_code, ready.status_code) == (503, 503)
    assert "retry-after" in refused.headers
    assert text == "abcdefgh"


async def test_root_source_is_freed_when_the_request_ends() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        await http.post(CHAT, json={**BODY, "user": "x" * 5000})
        await eventually(lambda: rig.store.stats()["memory"].num_tensors == 0)

    assert len(rig.fleet.bodies) == 1


async def test_timeline_is_for_the_tenant_that_asked_and_from_any_ingress() -> None:
    keys = {"acme": "sk-1", "other": "sk-2"}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": IMAGE_MODEL, "messages": [{"role": "user", "content": [picture]}]}
    acme, other = ({"authorization": f"Bearer {key}"} for key in keys.values())
    async with open_rig(api_keys=keys) as rig, _second_ingress(rig) as second_url, httpx.AsyncClient() as http:
        answer = await http.post(rig.url + CHAT, json=body, headers=acme)
        path = f"/v1/requests/{answer.json()['id']}"
        own = await http.get(rig.url + path, headers=acme)
        forwarded = await http.get(second_url + path, headers=acme)
        foreign = [await http.get(url + path, headers=other) for url in (rig.url, second_url)]

    report = own.json()
    assert own.content == forwarded.content
    assert [step["step"] for step in report["steps"]] == ["pre", "enc0", "dec"]
    assert {"ok"} == {step["outcome"] for step in report["steps"]}
    assert (report["status"], len(report["media"]), report["media"][0]["num_tokens"]) == ("finished", 1, 64)
    assert [answer.status_code for answer in foreign] == [404, 404]


def _second_ingress(rig: IngressRig) -> Any:
    return _Second(rig)


class _Second:
    """Another ingress on the same bus."""

    def __init__(self, rig: IngressRig) -> None:
        self._rig = rig

    async def __aenter__(self) -> str:
        rig = self._rig
        self._ingress = prepare_ingress(rig.ingress.settings, rig.broker.connect(), rig.store, SystemClock())
        self._served = served(await self._ingress.__aenter__())
        return await self._served.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self._served.__aexit__(*error)
        await self._ingress.__aexit__(*error)


async def test_drain_finishes_streams_and_refuses_new_work() -> None:
    gate = Gate(at=4)
    async with (
        open_rig(lambda _body: Script(pieces=LETTERS, before_token=gate)) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        running = asyncio.create_task(_read_stream(http))
        await gate.reached.wait()
        draining = asyncio.create_task(drain(rig.ingress))
        await eventually(lambda: rig.ingress.gate.is_draining)
        refused = await http.post(CHAT, json=BODY)
        health = [(await http.get(path)).status_code for path in ("/health/live", "/health/ready")]
        gate.opened.set()
        text = await running
        await draining

    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert health == [200, 503]
    assert text == "abcdefgh"


async def test_drain_gives_up_what_outlasts_the_grace_with_an_error() -> None:
    gate = Gate(at=4)
    async with (
        open_rig(lambda _body: Script(pieces=LETTERS, before_token=gate), drain_s=0.1) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        running = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
        await gate.reached.wait()
        await drain(rig.ingress)
        answer = await running
        gate.opened.set()

    assert b"[DONE]" not in answer.content
    assert b'"code":"server_stopping"' in answer.content


async def test_two_hundred_requests_at_concurrency_64_all_succeed() -> None:
    places = asyncio.Semaphore(64)

    async def ask(http: httpx.AsyncClient, number: int) -> bool:
        async with places:
            body = {**BODY, "messages": [{"role": "user", "content": str(number)}]}
            answer = await http.post(CHAT, json=body)
            return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == str(number)

    def echo(body: Any) -> Script:
        return Script(pieces=(body["messages"][0]["content"].encode(),))

    async with open_rig(echo) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        answers = await asyncio.gather(*(ask(http, number) for number in range(200)))

    assert sum(answers) == 200
