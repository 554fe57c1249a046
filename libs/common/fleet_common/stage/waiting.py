"""Waiting on a clock that tests drive by hand."""

from __future__ import annotations

import asyncio

from fleet_common.clock import Clock


async def wait_event(clock: Clock, event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, at most that long (None: for ever)."""
    if seconds is None:
        await event.wait()
        return
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(event.wait()), group.create_task(clock.sleep(max(0.0, seconds)))]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
