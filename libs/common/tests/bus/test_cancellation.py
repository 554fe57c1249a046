"""A task that is cancelled ends, whatever the library below makes of it."""

from __future__ import annotations

import asyncio

import pytest

from fleet_common.bus.cancellation import swallowing_no_cancel


async def swallow(seconds: float) -> None:
    """As nats-py does while it flushes."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return


async def test_a_swallowed_cancellation_ends_the_task() -> None:
    async def go_on_for_ever() -> None:
        while True:
            with swallowing_no_cancel():
                await swallow(60.0)

    task = asyncio.create_task(go_on_for_ever())
    await asyncio.sleep(0)
    task.cancel()

    async with asyncio.timeout(5.0):
        await asyncio.wait([task])
    assert task.cancelled()


async def test_a_timeout_around_it_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            with swallowing_no_cancel():
                await swallow(60.0)


async def test_what_is_done_on_the_way_out_of_a_cancelled_task_is_done_to_the_end() -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            for name in ("first", "second"):
                with swallowing_no_cancel():
                    await asyncio.sleep(0)
                    done.append(name)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert done == ["first", "second"]
