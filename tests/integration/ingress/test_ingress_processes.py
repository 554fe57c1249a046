"""An ingress as it runs: on NATS, behind its accounts, killed and drained from outside."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import Any

import httpx
import openai
import pytest

from tests.integration.ingress.conftest import DECODE_SLOTS, MODEL, FleetProcesses

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
_MESSAGES = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": _MESSAGES, **fields}


def text_of(stream: bytes) -> str:
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-300:]
    events = [json.loads(block[6:]) for block in stream.split(b"\n\n") if block.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def test_official_client_gets_the_same_text_whole_and_streamed(fleet: FleetProcesses) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fleet.urls[0]}/v1", api_key="x") as client:
        whole = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, max_tokens=5)
        stream = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, max_tokens=5, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert whole.choices[0].message.content == "".join(pieces)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 5


async def test_any_ingress_tells_the_timeline(fleet: FleetProcesses) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(fleet.urls[0] + CHAT, json=body(max_tokens=2))
        path = f"/v1/requests/{answer.json()['id']}"
        own, other = [(await http.get(url + path)).json() for url in fleet.urls[:2]]
        stranger = await http.get(fleet.urls[1] + "/v1/requests/nobody_" + "0" * 32)

    assert own == other
    assert [step["step"] for step in own["steps"]] == ["pre", "dec"]
    assert stranger.status_code == 404


async def test_thirty_two_clients_that_leave_free_the_decoder_at_once(fleet: FleetProcesses) -> None:
    """Case A21."""

    async def leave_after_two_events(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", CHAT, json=body(stream=True, max_tokens=2000, ignore_eos=True)) as answer:
            num_bytes = 0
            async for chunk in answer.aiter_bytes():
                num_bytes += chunk.count(b"\n\n")
                if num_bytes >= 2:
                    return

    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=60) as http:
        # Only as many as there are slots run at once; each leaves its slot to the next by going away.
        await asyncio.gather(*(leave_after_two_events(http) for _ in range(32)))
        started_s = time.monotonic()
        answer = await http.post(CHAT, json=body(max_tokens=2))
        waited_s = time.monotonic() - started_s
        metrics = (await http.get("/metrics")).text

    assert answer.status_code == 200
    assert waited_s < 5.0
    assert 'fleet_requests_cancelled_total{route="chat"} 32.0' in metrics


async def test_sigterm_finishes_streams_refuses_new_work_and_exits_cleanly(fleet: FleetProcesses) -> None:
    url = await asyncio.to_thread(fleet.start_ingress)
    ingress = fleet.ingresses[-1]
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        streams = [
            asyncio.create_task(http.post(CHAT, json=body(stream=True, max_tokens=60, ignore_eos=True)))
            for _ in range(DECODE_SLOTS)
        ]
        await asyncio.sleep(0.5)
        ingress.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        health = [(await http.get(path)).status_code for path in ("/health/live", "/health/ready")]
        refused = await http.post(CHAT, json=body())
        texts = [text_of((await stream).content) for stream in streams]

    assert health == [200, 503]
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert len(set(texts)) == 1
    assert await asyncio.to_thread(ingress.wait, 10) == 0
