"""Twenty requests in flight while something breaks: half streaming, half not, texts and pictures."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from loadtests.bench.client import stream_chat
from tests.support.scenes import data_url, picture_message, random_scene, render

NUM_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. `longest_gap_s` is 0 for answers that were not streamed."""

    text: str
    num_tokens: int
    longest_gap_s: float
    total_s: float
    request_id: str


def bodies(model: str, max_tokens: int, *, pictures: bool) -> list[dict[str, object]]:
    """Greedy requests with different prompts; with `pictures` every other one holds a picture."""
    rng = random.Random(5)
    made: list[dict[str, object]] = []
    for index in range(NUM_REQUESTS):
        message: dict[str, object] = {"role": "user", "content": f"Write {index + 3} sentences about the sea."}
        if pictures and index % 2:
            message = picture_message(data_url(render(random_scene(rng))), f"Describe picture number {index}.")
        made.append({"model": model, "messages": [message], "temperature": 0, "max_tokens": max_tokens})
    return made


async def _whole(client: httpx.AsyncClient, body: dict[str, object]) -> Outcome:
    started_s = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.text[:300]}")
    answer = response.json()
    text = answer["choices"][0]["message"]["content"]
    return Outcome(text, answer["usage"]["completion_tokens"], 0.0, time.perf_counter() - started_s, answer["id"])


async def _streamed(client: httpx.AsyncClient, body: dict[str, object]) -> Outcome:
    timed = await stream_chat(client, body)
    return Outcome(timed.text, timed.num_tokens, timed.longest_gap_s, timed.total_s, timed.request_id)


async def run_load(
    url: str, requests: list[dict[str, object]], disturb: Callable[[], Awaitable[None]] | None = None
) -> list[Outcome]:
    """Send all at once, every other one streaming; call `disturb` once they are under way. Raises on any error."""
    limits = httpx.Limits(max_connections=NUM_REQUESTS * 2)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_streamed(client, body) if index % 4 < 2 else _whole(client, body))
            for index, body in enumerate(requests)
        ]
        if disturb is not None:
            await disturb()
    return [task.result() for task in tasks]
