"""A clock that only moves when told, and wakes whoever sleeps on it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

#: Turns of the event loop given to whoever was woken, before time moves on.
_TURNS = 50


class ManualClock:
    """`Clock` for tests. `on_move` runs after every step of time (a memory broker's `tick`)."""

    def __init__(self, start_s: float = 1_000.0, unix_offset_s: float = 1_000_000.0) -> None:
        self.on_move: Callable[[], None] = lambda: None
        self._now_s = start_s
        self._unix_offset_s = unix_offset_s
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._unix_offset_s

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(0.0, seconds), next(self._numbers), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Let that much time pass, stopping at every sleeper on the way."""
        end_s = self._now_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, wake = heapq.heappop(self._sleepers)
            if wake.done():
                continue
            self._move(due_s)
            wake.set_result(None)
            await settle()
        self._move(end_s)
        await settle()

    def jump(self, seconds: float) -> None:
        """Let that much time pass while nobody runs, as when the process is stopped; sleepers wake in `advance`."""
        self._now_s += seconds

    def _move(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self.on_move()


async def settle() -> None:
    """Give every task that can run a chance to."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
