"""One supervised process: started in a group of its own, watched, started again, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fleet_cli.up.leftovers import Identity, end_group, identity
from fleet_cli.up.spec import ProcessSpec

BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

#: First line of an error nobody caught, and how many may follow it.
_ERROR = re.compile(r"^[\w.]+(Error|Exception)\b")
_ERROR_LINES = 12

#: Event of a worker's log that says why it ends.
_FAILED = "worker_failed"

#: A process that lived this long starts over with the shortest back-off.
_STEADY_S = 60.0


def _reasons(line: str) -> str:
    """What a worker says it failed of: one line, without the names of classes."""
    try:
        reasons = [str(reason) for reason in json.loads(line)["reasons"]]
    except (ValueError, KeyError, TypeError):
        return ""
    return "; ".join(" ".join(re.sub(r"^[A-Za-z.]*Error: ", "", reason).split()) for reason in reasons)


class Child:
    """A process and its history. `on_change` is called after each start and end.

    Attributes:
        num_early_deaths: ends since it was last ready.
        reason: of its latest end, for people.
    """

    def __init__(self, spec: ProcessSpec, log_path: Path, on_change: Callable[[Child, str], None]) -> None:
        self.spec = spec
        self.log_path = log_path
        self.is_ready = False
        self.num_early_deaths = 0
        self.reason = ""
        self.identity: Identity | None = None
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._started_s = time.monotonic()
        self._is_stopping = False
        self._has_ended = asyncio.Event()
        self._has_ended.set()
        self._stop_asked = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None and self.is_running else None

    @property
    def is_running(self) -> bool:
        return not self._has_ended.is_set()

    @property
    def waited_s(self) -> float:
        """Since its latest start."""
        return time.monotonic() - self._started_s

    def last_words(self) -> str:
        """Why it ended: the error it died of, or what it printed last."""
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        # A service's own last words are a line of its log.
        for line in reversed(lines[-_ERROR_LINES:]):
            if _FAILED in line and (reasons := _reasons(line)):
                return reasons[:300]
        # The last line of a settings error is a link; what is wrong stands in the lines before.
        for start in range(len(lines) - 1, max(-1, len(lines) - _ERROR_LINES), -1):
            if _ERROR.match(lines[start]):
                return " ".join(line.strip() for line in lines[start:])[:300]
        return lines[-1][:300] if lines else ""

    async def run(self) -> None:
        """Keep the process running until `stop` is asked for."""
        deaths = 0
        while not self._is_stopping:
            code = await self._live()
            if self._is_stopping:
                return
            deaths = deaths + 1 if self.waited_s < _STEADY_S else 1
            self.num_early_deaths += not self.is_ready
            self.is_ready = False
            delay_s = BACK_OFF_S[min(deaths, len(BACK_OFF_S)) - 1]
            how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
            # Whoever was killed had no say in it.
            self.reason = f"it was {how}" if code < 0 else self.last_words() or f"it {how}"
            self._on_change(self, f"{self.name} was {how}; starting it again in {delay_s:.0f} s ({self.log_path})")
            try:
                async with asyncio.timeout(delay_s):
                    await self._stop_asked.wait()
            except TimeoutError:
                continue

    async def _live(self) -> int:
        """One life: start, wait for the end, end what it left in its group."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.spec.environment),
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        self._has_ended.clear()
        self.identity = identity(self._process.pid)
        self._on_change(self, "")
        if self._is_stopping:
            self.signal(signal.SIGKILL)
        code = await self._process.wait()
        # Helpers of a killed process (an engine core) must not outlive it.
        await asyncio.to_thread(end_group, self._process.pid)
        self.identity = None
        self._has_ended.set()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; what is left of its group is ended once it is dead."""
        if self._process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def forbid_restart(self) -> None:
        """From now on an end is an end."""
        self._is_stopping = True
        self._stop_asked.set()

    async def ended(self) -> None:
        """Wait until it runs no longer."""
        await self._has_ended.wait()
