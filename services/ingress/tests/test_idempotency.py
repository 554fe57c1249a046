"""One `Idempotency-Key`, one request: whoever sends it, when, and however often."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from fleet_common.testing.clock import ManualClock
from fleet_contracts.events import Failure
from fleet_ingress.idempotency import IdempotentAnswers, Recording
from fleet_ingress.testing import TEXT_MODEL, Script, eventually, open_rig

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
KEY = {"idempotency-key": "order-7"}
OVERLOADED = Failure(error_type="server_error", code="engine_dead", message="x", status=500)
BAD = Failure(error_type="invalid_request_error", code="invalid_image", message="no", status=400, param="messages")


def held_script(gate: asyncio.Event) -> Script:
    """Two tokens; the second waits for the gate."""

    async def before_token(index: int) -> None:
        if index:
            await gate.wait()

    return Script(before_token=before_token)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_requests_with_one_key_are_one_request_running_or_done(body: dict[str, Any]) -> None:
    gate = asyncio.Event()
    async with open_rig(lambda _: held_script(gate)) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(http.post(CHAT, json=body, headers=KEY)) for _ in range(20)]
            await eventually(lambda: rig.fleet.num_running == 1)
            gate.set()
        done = [await http.post(CHAT, json=body, headers=KEY) for _ in range(3)]

    answers = [task.result() for task in running] + done
    assert len(rig.fleet.tasks) == 1
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert b"world" in answers[0].content
    assert len({answer.headers["x-fleet-request-id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1


async def test_a_client_that_left_comes_back_for_its_answer() -> None:
    gate = asyncio.Event()
    async with open_rig(lambda _: held_script(gate)) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        async with http.stream("POST", CHAT, json=STREAM, headers=KEY) as first:
            await anext(first.aiter_bytes())
        gate.set()
        again = await http.post(CHAT, json=STREAM, headers=KEY)

    assert len(rig.fleet.tasks) == 1
    assert again.content.endswith(b"data: [DONE]\n\n")
    assert b"Hello" in again.content and b"world" in again.content


async def test_a_key_used_for_another_body_or_route_is_refused() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        await http.post(CHAT, json=BODY, headers=KEY)
        body = await http.post(CHAT, json={**BODY, "seed": 1}, headers=KEY)
        route = await http.post("/v1/completions", json={"model": TEXT_MODEL, "prompt": "x"}, headers=KEY)

    for answer in (body, route):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")


@pytest.mark.parametrize("key", ["", "x" * 256, "a b"])
async def test_a_key_out_of_bounds_is_refused(key: str) -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answer = await http.post(CHAT, json=BODY, headers={"idempotency-key": key})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_tenants_do_not_share_keys() -> None:
    async with open_rig(api_keys={"a": "sk-1", "b": "sk-2"}) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answers = [
            await http.post(CHAT, json=BODY, headers={**KEY, "authorization": f"Bearer sk-{n}"}) for n in (1, 2, 1)
        ]

    assert len(rig.fleet.tasks) == 2
    assert answers[0].content == answers[2].content != answers[1].content


async def test_a_refusal_is_kept_and_a_fault_of_ours_is_tried_again() -> None:
    script = Script(fail=OVERLOADED)
    async with open_rig(lambda _: script) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        failed = await http.post(CHAT, json=BODY, headers=KEY)
        broken = await http.post(CHAT, json=STREAM, headers={"idempotency-key": "other"})
        script = Script(refuse=BAD)
        refused = [await http.post(CHAT, json=BODY, headers=KEY) for _ in range(2)]
        script = Script()
        whole = await http.post(CHAT, json=STREAM, headers={"idempotency-key": "other"})

    assert (failed.status_code, broken.status_code, whole.status_code) == (500, 500, 200)
    assert [answer.status_code for answer in refused] == [400, 400]
    assert len({answer.content for answer in refused}) == 1
    assert len(rig.fleet.tasks) == 4


async def test_a_stream_that_broke_off_is_broken_for_all_and_tried_again() -> None:
    script = Script(fail=OVERLOADED, fail_at=1)
    async with open_rig(lambda _: script) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        broken = await http.post(CHAT, json=STREAM, headers=KEY)
        script = Script()
        whole = await http.post(CHAT, json=STREAM, headers=KEY)

    assert b"[DONE]" not in broken.content and b"engine_dead" in broken.content
    assert whole.content.endswith(b"data: [DONE]\n\n")


async def made(answers: IdempotentAnswers, key: str, body: bytes) -> None:
    async def make(recording: Recording) -> None:
        await recording.send({"type": "http.response.start", "status": 200, "headers": []})
        await recording.send({"type": "http.response.body", "body": body, "more_body": False})

    recording = answers.start("t", key, b"f", make)
    await eventually(lambda: recording.ended_s is not None)


async def test_answers_are_forgotten_by_age_number_and_size() -> None:
    clock = ManualClock()
    answers = IdempotentAnswers(clock, ttl_s=60, max_answers=2, max_bytes=10)

    async with answers.running():
        await made(answers, "a", b"12")
        await made(answers, "b", b"12")
        await made(answers, "c", b"12")
        by_number = [answers.find("t", key, b"f") is not None for key in "abc"]
        await made(answers, "d", b"123456789")
        by_size = [answers.find("t", key, b"f") is not None for key in "bcd"]
        clock.jump(61)
        by_age = answers.find("t", "d", b"f")

    assert by_number == [False, True, True]
    assert by_size == [False, False, True]
    assert by_age is None


async def test_a_bug_is_a_500_for_its_clients_and_nobody_else() -> None:
    async def make(_recording: Recording) -> None:
        raise ValueError("bug")

    answers = IdempotentAnswers(ManualClock(), ttl_s=60, max_answers=2, max_bytes=10)
    async with answers.running():
        recording = answers.start("t", "a", b"f", make)
        await eventually(lambda: recording.ended_s is not None)

    assert recording.status == 500
    assert b"internal_error" in recording.body
