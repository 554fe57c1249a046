"""The fleet without its models: scripted engines, real broker and store. What the plumbing itself costs."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp

from fleet_cli.testing import RunningFleet, running_fleet
from loadtests.bench.figure import Figure

NUM_REQUESTS = 1000
CONCURRENCY = 64
MODEL = "omnifleet-vlm"


async def _flood(url: str) -> tuple[float, int]:
    """Requests per second and errors of `NUM_REQUESTS` short chats at `CONCURRENCY`."""
    gate = asyncio.Semaphore(CONCURRENCY)
    errors = 0

    async def one(client: aiohttp.ClientSession, index: int) -> None:
        nonlocal errors
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"short {index}"}], "max_tokens": 4}
        async with gate, client.post("/v1/chat/completions", json=body) as response:
            await response.read()
            errors += response.status != 200

    # aiohttp: a client that costs less than what it measures.
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(60)) as client:
        await one(client, -1)
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_REQUESTS):
                group.create_task(one(client, index))
        return NUM_REQUESTS / (time.perf_counter() - started_s), errors


def measure(fleet: RunningFleet) -> list[Figure]:
    """The figures of a fleet that runs already."""
    rate, errors = asyncio.run(_flood(fleet.url))
    return [
        Figure("control_plane_rps", rate, "requests/s", note=f"{NUM_REQUESTS} scripted chats at {CONCURRENCY}"),
        Figure("control_plane_errors", errors, "requests", note="must be 0"),
    ]


def figures() -> list[Figure]:
    """`control_plane_rps` and its errors."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"FLEET_ENGINE": "scripted", "FLEET_DECODE_SLOTS": "64"}
        with running_fleet(Path(folder) / "fleet", settings) as fleet:
            return measure(fleet)
