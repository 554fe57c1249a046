"""Cancellation that libraries swallow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def swallowing_no_cancel() -> Iterator[None]:
    """Raise CancelledError at the end of the block when the task was cancelled in it, whatever the block did of that.

    nats-py drops a cancellation that arrives while it flushes, drains or closes, and so does `asyncio.wait_for`, with
    which it waits for answers, before Python 3.12 when the answer arrives at the same moment. A loop that is cancelled
    once would go on for ever.
    """
    before = _num_cancels()
    try:
        yield
    finally:
        if _num_cancels() > before:
            raise asyncio.CancelledError


def _num_cancels() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
