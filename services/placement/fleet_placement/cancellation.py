"""Cancellation that libraries swallow."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError once the current task was cancelled, even if something below swallowed that.

    `asyncio.wait_for` does so before Python 3.12 when its future ends at the same moment, and nats-py while it drains
    a subscription. Loops that run for ever call this each time round; not in a task that opened a TaskGroup, whose own
    count such a group may leave raised.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
