"""Time as a dependency: real in services, driven by hand in tests."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks and a way to wait."""

    def monotonic_s(self) -> float:
        """Seconds for durations."""

    def unix_s(self) -> float:
        """Wall-clock seconds, the only kind that crosses processes."""

    async def sleep(self, seconds: float) -> None:
        """Wait that long on this clock."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
