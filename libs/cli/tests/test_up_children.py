"""The processes of a stack at its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rich.console import Console

from fleet_cli.up.children import Children
from fleet_cli.up.progress import Progress
from fleet_cli.up.rundir import RunDir
from fleet_cli.up.spec import ProcessSpec, StopRank


def process(name: str) -> ProcessSpec:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    return ProcessSpec(name=name, command=command, environment={}, port=0, rank=StopRank.WORKER)


async def test_what_is_launched_while_the_stack_ends_is_not_started(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    has_started = asyncio.Event()
    children = Children(run_dir, Progress(Console(quiet=True)), has_started.set)
    async with asyncio.timeout(20.0), asyncio.TaskGroup() as tasks:
        children.launch(tasks, process("before"))
        await has_started.wait()
        children.forbid_starts()
        children.launch(tasks, process("after"))
        await asyncio.sleep(0.05)
        running = {child.name for child in children if child.is_running}
        await children.kill(list(children))

    assert running == {"before"}
