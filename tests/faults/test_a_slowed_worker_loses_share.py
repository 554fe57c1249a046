"""REQUIREMENTS C6: a worker slowed fourfold loses share; with placement frozen, clients notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from fleet_cli.testing import RunningFleet, running_fleet

pytestmark = pytest.mark.e2e

SETTINGS = {
    "FLEET_ENGINE": "scripted",
    "FLEET_DECODE_REPLICAS": "2",
    "FLEET_DECODE_ENGINE_ARGS": '{"token_delay_s": 0.01}',
}
BODY = {"model": "omnifleet-vlm", "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 16}
CONCURRENCY = 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("pair"), SETTINGS, timeout_s=60.0) as fleet:
        fleet.wait_workers("decode", 2, 30.0)
        yield fleet


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[list[int]]:
    """Requests in a row on every lane; yields the statuses so far."""
    statuses: list[int] = []
    is_over = asyncio.Event()

    async def lane(client: httpx.AsyncClient) -> None:
        while not is_over.is_set():
            response = await client.post("/v1/chat/completions", json=BODY)
            statuses.append(response.status_code)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as lanes:
        for _ in range(CONCURRENCY):
            lanes.create_task(lane(client))
        yield statuses
        is_over.set()


@contextlib.asynccontextmanager
async def slowed_fourfold(pid: int) -> AsyncIterator[None]:
    """Let a process run a quarter of the time."""

    async def stutter() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.075)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.025)

    stuttering = asyncio.create_task(stutter())
    try:
        yield
    finally:
        stuttering.cancel()
        os.kill(pid, signal.SIGCONT)


async def share_of(fleet: RunningFleet, worker: str) -> tuple[float, int, list[str]]:
    """Share, revision and reasons of the table in force."""
    table = (await asyncio.to_thread(fleet.status))["table"]
    decode = next(route for route in table["routes"] if route["stage"] == "decode")
    return decode["pools"][0]["shares"][worker], table["revision"], table["reasons"]


async def settled_share(fleet: RunningFleet, worker: str) -> tuple[float, int]:
    """Share and revision once a worker has about half of the work and the table has stayed for 3 s."""
    share, revision, since_s = 0.0, -1, time.monotonic()
    async with asyncio.timeout(90.0):
        while time.monotonic() - since_s < 3.0 or not 0.35 <= share <= 0.65:
            await asyncio.sleep(0.5)
            share, now, _ = await share_of(fleet, worker)
            if now != revision:
                revision, since_s = now, time.monotonic()
    return share, revision


async def slow_down(fleet: RunningFleet, worker: str) -> tuple[int, list[str]]:
    """Slow a worker that has half of the work until it has less; returns in how many tables, and the last's reasons."""
    before, revision = await settled_share(fleet, worker)
    share, now, reasons = before, revision, []
    async with slowed_fourfold(fleet.stack()["processes"][worker]["pid"]), asyncio.timeout(40.0):
        while now == revision or share > before - 0.1:
            await asyncio.sleep(0.5)
            share, now, reasons = await share_of(fleet, worker)
    print(f"share {before:.2f} -> {share:.2f} in {now - revision} tables: {reasons}")
    return now - revision, reasons


async def test_a_worker_slowed_fourfold_loses_share_within_two_tables(pair: RunningFleet) -> None:
    """The machine is shared: too many tables, or a share lost for another reason, must be so twice."""
    async with load(pair.url) as statuses:
        await asyncio.sleep(8.0)
        for _ in range(2):
            num_tables, reasons = await slow_down(pair, "decode-1")
            is_named = any("decode-1 slowed: service" in reason for reason in reasons)
            if num_tables <= 2 and is_named:
                break

    assert num_tables <= 2
    assert is_named, reasons
    assert set(statuses) == {200}


async def test_a_fleet_without_placement_goes_on(pair: RunningFleet) -> None:
    pid = pair.stack()["processes"]["placement"]["pid"]
    async with load(pair.url) as statuses:
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(8.0)
            num_before = len(statuses)
            await asyncio.sleep(2.0)
        finally:
            os.kill(pid, signal.SIGCONT)

    assert len(statuses) > num_before > 0
    assert set(statuses) == {200}
