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


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_one_key_is_one_execution_though_its_worker_is_killed(real_fleet: RunningFleet, is_stream: bool) -> None:
    victims = [worker["pid"] for worker in await asyncio.to_thread(real_fleet.wait_workers, "decode", 2)]
    headers = {"idempotency-key": f"story-{is_stream}"}
    body = {**BODY, "stream": is_stream}
    before = await asyncio.to_thread(num_executed, real_fleet.url)

    async with (
        httpx.AsyncClient(base_url=real_fleet.url, timeout=120) as http,
        asyncio.TaskGroup() as group,
    ):

        async def send() -> httpx.Response:
            return await http.post("/v1/chat/completions", json=body, headers=headers)

        tasks = [group.create_task(send()) for _ in range(25)]
        await asyncio.sleep(UNDER_WAY_S)
        # All of them, so that the one at work is among them.
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        tasks += [group.create_task(send()) for _ in range(15)]
        await tasks[0]
        tasks += [group.create_task(send()) for _ in range(10)]

    answers = [task.result() for task in tasks]
    assert len(answers) == 50
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["x-fleet-request-id"] for answer in answers}) == 1
    assert await asyncio.to_thread(num_executed, real_fleet.url) == before + 1
    steps = await asyncio.to_thread(steps_of, real_fleet.url, answers[0].headers["x-fleet-request-id"])
    assert any(step["stage"] == "decode" and (step["delivery"] > 1 or step["epoch"] > 0) for step in steps), steps
    await asyncio.to_thread(real_fleet.wait_workers, "decode", 2)
