"""All processes of a stack: started, watched, waited for, stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fleet_cli.errors import CliError
from fleet_cli.up import probe
from fleet_cli.up.child import Child
from fleet_cli.up.progress import Progress, Waiting
from fleet_cli.up.rundir import RunDir
from fleet_cli.up.spec import ProcessSpec

POLL_S = 0.25

#: A process that ended so often before it was ever ready will not come up by itself.
_MAX_EARLY_DEATHS = 3


class ChildFailedError(CliError):
    """A process keeps ending before it ever was ready."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} does not start: {child.reason} (see {child.log_path})")


class Children:
    """The processes of one stack by name.

    Args:
        on_change: told after each start and end of a process.
    """

    def __init__(self, run_dir: RunDir, progress: Progress, on_change: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._progress = progress
        self._on_change = on_change
        self._children: dict[str, Child] = {}
        self._reasons: dict[str, str] = {}
        self._is_ending = False

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def described(self) -> dict[str, Any]:
        """For `stack.json`."""
        return {
            name: {
                "pid": child.pid,
                "start_ticks": child.identity.start_ticks if child.identity else 0,
                "port": child.spec.port,
                "log": str(child.log_path),
            }
            for name, child in self._children.items()
        }

    def launch(self, tasks: asyncio.TaskGroup, process: ProcessSpec) -> None:
        """Start a process, and start it again whenever it ends; once the stack ends, nothing starts any more."""
        log_path = self._run_dir.logs / f"{process.name}.log"
        log_path.unlink(missing_ok=True)
        child = Child(process, log_path, self._changed)
        self._children[process.name] = child
        if self._is_ending:
            child.forbid_restart()
        tasks.create_task(child.run(), name=process.name)

    def forbid_starts(self) -> None:
        """From now on an end is an end, also for what somebody is about to launch."""
        self._is_ending = True
        for child in self:
            child.forbid_restart()

    async def watch(self) -> None:
        """Notice who becomes ready, and say what is being waited for."""
        while True:
            pending = [child for child in self if not child.is_ready]
            await asyncio.gather(*(self._check(child) for child in pending))
            self._progress.waiting(
                [Waiting(child.name, self.detail(child), child.waited_s) for child in pending if not child.is_ready]
            )
            await asyncio.sleep(POLL_S)

    def detail(self, child: Child) -> str:
        """What a child that is not ready does: its own words, unless they are only that it starts."""
        reason = self._reasons.get(child.name, "")
        return child.spec.waits_for if reason in ("", "starting") else reason

    def waits_for(self, names: Iterable[str]) -> str:
        """What is missing until these are ready: `decode-0 (loading weights)`; "" when nothing is."""
        pending = [self._children[name] for name in names if not self._children[name].is_ready]
        return ", ".join(f"{child.name} ({self.detail(child)})" for child in pending)

    async def until_ready(self, names: Sequence[str]) -> None:
        """Wait for processes. Raises ChildFailedError when one keeps ending before it ever was ready."""
        while not all(self._children[name].is_ready for name in names):
            self.check(names)
            await asyncio.sleep(POLL_S / 2)

    def check(self, names: Iterable[str]) -> None:
        """Raises ChildFailedError when one of these keeps ending before it ever was ready."""
        for name in names:
            if self._children[name].num_early_deaths >= _MAX_EARLY_DEATHS:
                raise ChildFailedError(self._children[name])

    async def remove(self, names: Iterable[str], timeout_s: float) -> None:
        """Stop processes for good: told to, then killed."""
        members = [self._children[name] for name in names if name in self._children]
        for child in members:
            child.forbid_restart()
            child.signal(signal.SIGTERM)
        await self.wait_ended(members, timeout_s, lambda: False)
        await self.kill(members)
        for child in members:
            self._children.pop(child.name, None)
            self._reasons.pop(child.name, None)
        self._on_change()

    async def wait_ended(self, members: Sequence[Child], timeout_s: float, is_hurried: Callable[[], bool]) -> None:
        """Wait for the members' ends, for the time to pass, or until it has to go faster."""
        deadline_s = time.monotonic() + timeout_s
        while any(child.is_running for child in members):
            if is_hurried() or time.monotonic() > deadline_s:
                return
            await asyncio.sleep(POLL_S / 5)

    async def kill(self, members: Sequence[Child]) -> None:
        """End those that still run."""
        for child in members:
            if child.is_running:
                self._progress.line(f"{child.name} did not end in time: killed")
                child.signal(signal.SIGKILL)
        await asyncio.gather(*(child.ended() for child in members))

    def _changed(self, child: Child, text: str) -> None:
        if text:
            self._progress.line(text)
        self._on_change()

    async def _check(self, child: Child) -> None:
        pid = child.pid
        if pid is None:
            return
        if child.spec.ready_url:
            answer = await probe.ask_ready(child.spec.ready_url)
        else:
            has_file = child.spec.ready_path is None or child.spec.ready_path.exists()
            answer = probe.Answer(is_ready=has_file and await probe.listens(child.spec.port))
        self._reasons[child.name] = answer.reason
        if answer.is_ready and child.pid == pid:
            child.is_ready, child.num_early_deaths = True, 0
            self._progress.line(f"{child.name} is ready ({child.waited_s:.0f} s)")
