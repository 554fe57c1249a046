"""Issue 3, Show: 50 requests with one Idempotency-Key, some after a kill: one execution, 50 equal answers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import httpx
import pytest

from fleet_cli.testing import RunningFleet

pytestmark = pytest.mark.e2e
BODY = {
    "model": "omnifleet-vlm",
    "messages": [{"role": "user", "content": "Tell me a long story about a fox."}],
    "temperature": 0,
    "max_tokens": 96,
}
UNDER_WAY_S = 0.7


def num_executed(http_url: str) -> int:
    """Chat requests the ingress has finished."""
    text = httpx.get(f"{http_url}/metrics", timeout=10).text
    counts = re.findall(r'^gen_ai_server_request_duration_seconds_count\{[^}]*"chat"[^}]*\} ([\d.]+)', text, re.M)
    return int(sum(float(count) for count in counts))


def steps_of(http_url: str, request_id: str) -> list[dict[str, Any]]:
    """Every attempt of every step of a request."""
    steps: list[dict[str, Any]] = httpx.get(f"{http_url}/v1/requests/{request_id}", timeout=10).json()["steps"]
    return steps


async def test_one_key_is_one_execution_though_its_worker_is_killed(real_fleet: RunningFleet) -> None:
    """Two keys at once: of a whole answer and of a stream."""
    victims = [worker["pid"] for worker in await asyncio.to_thread(real_fleet.wait_workers, "decode", 2)]
    before = await asyncio.to_thread(num_executed, real_fleet.url)
    tasks: dict[bool, list[asyncio.Task[httpx.Response]]] = {False: [], True: []}

    async with (
        httpx.AsyncClient(base_url=real_fleet.url, timeout=120, limits=httpx.Limits(max_connections=100)) as http,
        asyncio.TaskGroup() as group,
    ):

        def send(num: int) -> None:
            for is_stream, sent in tasks.items():
                headers, body = {"idempotency-key": f"story-{is_stream}"}, {**BODY, "stream": is_stream}
                for _ in range(num):
                    sent.append(group.create_task(http.post("/v1/chat/completions", json=body, headers=headers)))

        send(25)
        await asyncio.sleep(UNDER_WAY_S)
        # All of them, so that the one at work is among them.
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        send(15)
        await asyncio.gather(tasks[False][0], tasks[True][0])
        send(10)

    for sent in tasks.values():
        await assert_one_execution(real_fleet, [task.result() for task in sent])
    assert await asyncio.to_thread(num_executed, real_fleet.url) == before + 2
    await asyncio.to_thread(real_fleet.wait_workers, "decode", 2)


async def assert_one_execution(fleet: RunningFleet, answers: list[httpx.Response]) -> None:
    """50 equal answers of one request, whose decode step ran again."""
    assert len(answers) == 50
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["x-fleet-request-id"] for answer in answers}) == 1
    steps = await asyncio.to_thread(steps_of, fleet.url, answers[0].headers["x-fleet-request-id"])
    assert any(step["stage"] == "decode" and (step["delivery"] > 1 or step["epoch"] > 0) for step in steps), steps
