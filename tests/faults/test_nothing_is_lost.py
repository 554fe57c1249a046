"""REQUIREMENTS F1 on a fleet of real models: whatever dies under load, every request ends once, and right."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import httpx
import pytest

from fleet_cli.testing import RunningFleet
from tests.support.load import NUM_REQUESTS, Outcome, bodies, run_load
from tests.support.stack import flush_store

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
MAX_TOKENS = 96
MAX_PAUSE_S = 10.0
#: Where two cores are the fleet's own, no stream pauses longer when nothing breaks; a slower machine has more time.
QUIET_PAUSE_S = 3.0
#: Breaks something while the load runs.
Fault = Callable[[], Awaitable[None]]
#: Most requests are past their first token by then, and none is done.
UNDER_WAY_S = 1.5


async def anywhere(fault: Fault) -> Fault:
    """A fault that needs no aim."""
    return fault


@pytest.fixture(scope="module")
def undisturbed(real_fleet: RunningFleet) -> list[Outcome]:
    """What the same requests answer when nothing breaks."""
    return asyncio.run(run_load(real_fleet.url, bodies(MODEL, MAX_TOKENS, pictures=True)))


def num_repeated(fleet: RunningFleet, outcomes: list[Outcome]) -> int:
    """How many requests had a step that ran a second time: proof that the fault hit them."""
    with httpx.Client(base_url=fleet.url, timeout=10) as client:
        reports = [client.get(f"/v1/requests/{outcome.request_id}").json() for outcome in outcomes]
    return sum(any(step["delivery"] > 1 or step["epoch"] > 0 for step in report["steps"]) for report in reports)


async def assert_nothing_is_lost(
    fleet: RunningFleet, undisturbed: list[Outcome], aim: Callable[[], Awaitable[Fault]]
) -> int:
    """Run the load, break something in the middle, compare with the undisturbed run; returns repeated requests.

    `aim` is awaited before the load and finds what to hit. The machine is shared: a pause that is too long must be so
    twice, by the measure of what the undisturbed run took there. Nothing may be lost in either run.
    """
    before_s = max(outcome.longest_gap_s for outcome in undisturbed)
    max_pause_s = MAX_PAUSE_S * max(1.0, before_s / QUIET_PAUSE_S)
    for _ in range(2):
        longest_s, repeated = await disturbed_run(fleet, undisturbed, await aim())
        print(f"longest pause {longest_s:.1f} s, {before_s:.1f} s undisturbed; {repeated} requests had a step repeated")
        if longest_s - before_s <= max_pause_s:
            break
    assert longest_s - before_s <= max_pause_s
    return repeated


async def disturbed_run(fleet: RunningFleet, undisturbed: list[Outcome], disturb: Fault) -> tuple[float, int]:
    """One run: seconds of the longest pause, and how many requests had a step repeated."""
    outcomes = await run_load(fleet.url, bodies(MODEL, MAX_TOKENS, pictures=True), disturb)

    assert len(outcomes) == NUM_REQUESTS
    longest_s = max(outcome.longest_gap_s for outcome in outcomes)
    repeated = await asyncio.to_thread(num_repeated, fleet, outcomes)
    assert [outcome.text for outcome in outcomes] == [outcome.text for outcome in undisturbed]
    assert [outcome.num_tokens for outcome in outcomes] == [outcome.num_tokens for outcome in undisturbed]
    return longest_s, repeated


async def hit_vision(pid: int, number: signal.Signals) -> None:
    """An encoder is too fast to be caught at work: freeze it as the load arrives, so that it dies holding steps."""
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(UNDER_WAY_S)
    if number == signal.SIGKILL:
        os.kill(pid, number)
        return
    await asyncio.sleep(13)
    os.kill(pid, signal.SIGCONT)


async def hit_decode(pid: int, number: signal.Signals) -> None:
    """Kill or freeze in the middle of the streams; a frozen one goes on after the others have taken over."""
    await asyncio.sleep(UNDER_WAY_S)
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        await asyncio.sleep(15)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize(("stage", "hit"), [("vision_encode", hit_vision), ("decode", hit_decode)])
async def test_requests_survive_a_worker(
    real_fleet: RunningFleet,
    undisturbed: list[Outcome],
    stage: str,
    hit: Callable[[int, signal.Signals], Awaitable[None]],
    number: signal.Signals,
) -> None:
    async def aim() -> Fault:
        victim = (await asyncio.to_thread(real_fleet.wait_workers, stage, 2))[0]["pid"]
        return lambda: hit(victim, number)

    repeated = await assert_nothing_is_lost(real_fleet, undisturbed, aim)

    assert repeated > 0
    await asyncio.to_thread(real_fleet.wait_workers, stage, 2)


async def test_requests_survive_the_broker(real_fleet: RunningFleet, undisturbed: list[Outcome]) -> None:
    async def kill_broker() -> None:
        await asyncio.sleep(UNDER_WAY_S)
        os.kill(real_fleet.stack()["processes"]["nats-server"]["pid"], signal.SIGKILL)

    await assert_nothing_is_lost(real_fleet, undisturbed, lambda: anywhere(kill_broker))


async def test_requests_survive_a_flush_of_the_store(real_fleet: RunningFleet, undisturbed: list[Outcome]) -> None:
    async def flush() -> None:
        # Again and again while requests enter: pixels, embeddings and root sources are all hit.
        for _ in range(8):
            await asyncio.sleep(0.05)
            await asyncio.to_thread(flush_store, real_fleet)

    await assert_nothing_is_lost(real_fleet, undisturbed, lambda: anywhere(flush))


async def test_clients_notice_nothing_when_placement_is_gone(
    real_fleet: RunningFleet, undisturbed: list[Outcome]
) -> None:
    async def kill_placement() -> None:
        os.kill(real_fleet.stack()["processes"]["placement"]["pid"], signal.SIGKILL)

    await assert_nothing_is_lost(real_fleet, undisturbed, lambda: anywhere(kill_placement))

    answer = await asyncio.to_thread(httpx.get, f"{real_fleet.url}/health/live", timeout=5)
    assert answer.status_code == 200
