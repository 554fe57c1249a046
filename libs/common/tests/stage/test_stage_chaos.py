"""Everything at once, many times over: whatever is killed, cut, flushed or delivered again, every request ends once."""

from __future__ import annotations

import random

import pytest

from fleet_common.settings import RunnerSettings
from fleet_common.stage.port import StepItem
from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine
from fleet_common.testing.plans import chat_task
from fleet_common.testing.rig import Rig, RigWorker
from fleet_contracts.base import Stage
from fleet_contracts.events import Finished
from fleet_contracts.work import StepTask

STAGES = (Stage.PREPROCESS, Stage.VISION_ENCODE, Stage.DECODE)
NUM_TOKENS = 6


class Chaos:
    """A fleet of two workers per stage, and someone who breaks it. Reproducible by its seed."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._random = random.Random(seed)
        self._workers: dict[tuple[Stage, int], RigWorker] = {}
        self._num_started = 0

    async def start(self) -> None:
        for stage in STAGES:
            for number in range(2):
                await self._start(stage, number)

    async def _start(self, stage: Stage, number: int) -> None:
        async def pause() -> None:
            await self._rig.clock.sleep(self._random.uniform(0.01, 0.3))

        async def before_token(item: StepItem, index: int) -> None:
            await self._rig.clock.sleep(self._random.uniform(0.01, 0.2))

        engine = (
            ScriptedStreamEngine(NUM_TOKENS, before_token=before_token)
            if stage is Stage.DECODE
            else ScriptedBatchEngine(gate=pause, max_batch=2)
        )
        self._num_started += 1
        worker_id = f"w{self._num_started}"
        self._workers[(stage, number)] = await self._rig.worker(stage, engine, worker_id=worker_id)

    async def break_something(self) -> None:
        action = self._random.choice(
            (self._kill, self._kill, self._drain, self._cut, self._redeliver, self._lose, self._freeze)
        )
        await action()

    async def _kill(self) -> None:
        where = self._random.choice(list(self._workers))
        await self._workers[where].kill()
        await self._start(*where)

    async def _drain(self) -> None:
        where = self._random.choice(list(self._workers))
        worker = self._workers[where]
        worker.runner.drain()
        await self._start(*where)
        await self._rig.clock.advance(self._rig.settings.drain_s + 0.5)
        await worker.drained()

    async def _cut(self) -> None:
        self._rig.broker.go_down()
        await self._rig.clock.advance(self._random.uniform(0.1, 3.0))
        await self._rig.broker.come_back()

    async def _redeliver(self) -> None:
        self._rig.broker.redeliver()

    async def _freeze(self) -> None:
        self._rig.clock.jump(self._rig.settings.ack_wait_s + 1.0)

    async def _lose(self) -> None:
        """Some tensors of the steps that wait are gone."""
        for stage in (Stage.VISION_ENCODE, Stage.DECODE):
            for task in self._rig.tasks(stage):
                for output in task.inputs.values():
                    for ref in output.tensors.values():
                        if self._random.random() < 0.3:
                            await self._rig.store.release(ref)


@pytest.mark.parametrize("seed", range(8))
async def test_every_request_ends_once_whatever_breaks(seed: int) -> None:
    # The mover is not here to bury what was delivered too often: chaos must not count as poison.
    rig = Rig(settings=RunnerSettings.model_validate({"max_deliver": 1000}))
    await rig.start()
    chaos = Chaos(rig, seed)
    await chaos.start()
    chooser = random.Random(seed)
    tasks: list[StepTask] = []

    for _ in range(10):
        for _ in range(2):
            tasks.append(chat_task(now_unix_s=rig.clock.unix_s(), num_images=chooser.randrange(3), timeout_s=3600.0))
            await rig.submit(tasks[-1])
        await rig.clock.advance(chooser.uniform(0.05, 1.0))
        await chaos.break_something()
    for _ in range(30):
        if all(rig.ingress.view(task.request_id).terminal for task in tasks):
            break
        await rig.clock.advance(10.0)
    await rig.clock.advance(60.0)
    left = {stage: len(rig.tasks(stage)) for stage in STAGES}
    await rig.stop()

    for task in tasks:
        view = rig.ingress.view(task.request_id)
        assert [type(event) for event in view.terminal] == [Finished], task.request_id
        assert view.tokens == list(range(NUM_TOKENS))
    assert left == dict.fromkeys(STAGES, 0)
