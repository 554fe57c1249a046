"""What engines do wrong, and who pays for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import pytest

from fleet_common.errors import (
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
    FleetError,
    InvalidInputError,
    StoreError,
)
from fleet_common.stage.port import Product, StepItem
from fleet_common.testing.clock import settle
from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine, default_product
from fleet_common.testing.plans import POOLS, chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts import codec, subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.events import Failed
from fleet_contracts.work import MOVE_STRIDE, StepTask

PRE_SUBJECT = subjects.work(Stage.PREPROCESS, POOLS[Stage.PREPROCESS], PriorityClass.REALTIME)


def _failure(rig: Rig, task: StepTask) -> tuple[int, str]:
    (event,) = rig.ingress.view(task.request_id).terminal
    assert isinstance(event, Failed)
    return event.failure.status, event.failure.code


async def test_bad_input_is_told_once_and_acked(rig: Rig) -> None:
    def refuse(item: StepItem) -> FleetError:
        return InvalidInputError("not a picture", param="messages[0].content[1].image_url")

    engine = ScriptedBatchEngine(refuse)
    await rig.worker(Stage.PREPROCESS, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s())

    await rig.submit(task)
    await rig.clock.advance(0.5)

    (event,) = rig.ingress.view(task.request_id).terminal
    assert isinstance(event, Failed)
    assert (event.failure.status, event.failure.code, event.failure.message) == (400, "invalid_input", "not a picture")
    assert event.failure.param == "messages[0].content[1].image_url"
    assert len(engine.calls) == 1
    assert rig.tasks(Stage.PREPROCESS) == []


async def test_poison_in_a_batch_is_found_by_halving(rig: Rig) -> None:
    bad = chat_task(now_unix_s=rig.clock.unix_s())
    good = [chat_task(now_unix_s=rig.clock.unix_s()) for _ in range(3)]

    def raising(item: StepItem) -> Product:
        if item.task.request_id == bad.request_id:
            raise RuntimeError("boom /secret/path")
        return default_product(item)

    gate = asyncio.Event()
    engine = ScriptedBatchEngine(raising, gate=gate.wait)
    await rig.worker(Stage.PREPROCESS, engine)
    blocker = chat_task(now_unix_s=rig.clock.unix_s())
    for task in [blocker, bad, *good]:
        await rig.submit(task)
    gate.set()
    await rig.clock.advance(2.0)

    assert _failure(rig, bad) == (500, "engine_error")
    (event,) = rig.ingress.view(bad.request_id).terminal
    assert isinstance(event, Failed)
    assert "secret" not in event.failure.message
    decode_ids = {task.request_id for task in rig.tasks(Stage.DECODE)}
    assert {task.request_id for task in [blocker, *good]} == decode_ids
    assert 4 in engine.batch_sizes()


async def test_batch_that_runs_out_of_memory_is_split(rig: Rig) -> None:
    class Small(ScriptedBatchEngine):
        async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
            if len(items) > 2:
                self.calls.append(list(items))
                raise EngineOutOfMemoryError("too many")
            return await super().run(items)

    gate = asyncio.Event()
    engine = Small(gate=gate.wait)
    await rig.worker(Stage.PREPROCESS, engine)
    tasks = [chat_task(now_unix_s=rig.clock.unix_s()) for _ in range(5)]
    for task in tasks:
        await rig.submit(task)
    gate.set()
    await rig.clock.advance(1.0)

    assert {task.request_id for task in tasks} == {task.request_id for task in rig.tasks(Stage.DECODE)}
    assert engine.batch_sizes() == [1, 4, 2, 2]


async def test_lone_step_out_of_memory_fails_only_after_it_recurs(rig: Rig) -> None:
    engine = ScriptedStreamEngine(before_token=_raising(EngineOutOfMemoryError("no room")))
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    await rig.worker(Stage.DECODE, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s())

    await rig.submit(task)
    await rig.clock.advance(5.0)

    assert _failure(rig, task) == (503, "engine_out_of_memory")
    assert 3 <= len(engine.started) <= 6
    assert rig.tasks(Stage.DECODE) == []


def _raising(error: Exception) -> Callable[[StepItem, int], Awaitable[None]]:
    async def before(item: StepItem, number: int) -> None:
        raise error

    return before


async def test_error_of_a_stream_is_retried_once(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    engine = ScriptedStreamEngine(before_token=_raising(ValueError("boom")))
    await rig.worker(Stage.DECODE, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s())

    await rig.submit(task)
    await rig.clock.advance(2.0)

    assert _failure(rig, task) == (500, "engine_error")
    assert len(engine.started) == 2


async def test_dead_engine_ends_the_worker_and_gives_its_work_back(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    dying = await rig.worker(Stage.DECODE, ScriptedStreamEngine(before_token=_raising(EngineDeadError("gone"))))
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)
    await rig.clock.advance(0.1)

    with pytest.raises(BaseExceptionGroup) as caught:
        await dying.job
    await dying.bus.close()
    await rig.worker(Stage.DECODE, ScriptedStreamEngine(num_tokens=2), worker_id="w1")
    await rig.clock.advance(0.5)

    assert caught.value.subgroup(EngineDeadError) is not None
    assert rig.ingress.view(task.request_id).tokens == [0, 1]


async def test_bytes_that_are_no_task_are_dead_lettered(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    bus = rig.broker.connect()

    await bus.publish_work(PRE_SUBJECT, b"\xc1nonsense", message_id="x", ttl_s=60.0)
    await rig.clock.advance(0.1)

    (letter,) = rig.broker.dead_letters
    assert (letter.reason, letter.payload, letter.subject) == ("undecodable", b"\xc1nonsense", PRE_SUBJECT)
    assert rig.broker.work.payloads([Stage.PREPROCESS]) == []


async def test_step_whose_worker_died_is_published_to_run_alone(rig: Rig) -> None:
    gate = asyncio.Event()
    first = await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(gate=gate.wait))
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)
    await first.kill()
    engine = ScriptedBatchEngine()
    await rig.worker(Stage.PREPROCESS, engine, worker_id="w1")

    await rig.clock.advance(rig.settings.ack_wait_s + 1.0)

    (call,) = engine.calls
    assert [(i.task.solo, i.task.epoch, i.attempt.delivery) for i in call] == [(True, MOVE_STRIDE, 1)]
    assert [task.request_id] == [after.request_id for after in rig.tasks(Stage.DECODE)]


async def test_solo_step_waits_for_an_empty_engine_and_keeps_others_out(rig: Rig) -> None:
    gates: list[asyncio.Event] = []

    async def gate() -> None:
        gates.append(asyncio.Event())
        await gates[-1].wait()

    engine = ScriptedBatchEngine(max_batch=2, gate=gate)
    await rig.worker(Stage.PREPROCESS, engine)
    now_unix_s = rig.clock.unix_s()
    alone = msgspec.structs.replace(chat_task(now_unix_s=now_unix_s - 1), solo=True)
    await rig.submit(chat_task(now_unix_s=now_unix_s))
    await rig.submit(alone)
    await rig.submit(chat_task(now_unix_s=now_unix_s))

    running_with_the_first = len(engine.calls)
    gates[0].set()
    await settle()
    while_alone = [[item.task.solo for item in call] for call in engine.calls]
    gates[1].set()
    await settle()

    assert running_with_the_first == 1
    assert while_alone == [[False], [True]]
    assert [[item.task.solo for item in call] for call in engine.calls] == [[False], [True], [False]]
    gates[2].set()


async def test_step_whose_engine_lacks_a_dependency_runs_again_without_a_nak(rig: Rig) -> None:
    answers: list[Product | FleetError] = [StoreError("away"), StoreError("away")]

    def flaky(item: StepItem) -> Product | FleetError:
        return answers.pop() if answers else default_product(item)

    engine = ScriptedBatchEngine(flaky)
    await rig.worker(Stage.PREPROCESS, engine)

    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))
    await rig.clock.advance(3.0)

    assert [call[0].attempt.delivery for call in engine.calls] == [1, 1, 1]
    assert len(rig.tasks(Stage.DECODE)) == 1


async def test_wrong_number_of_results_is_the_engines_fault(rig: Rig) -> None:
    class Short(ScriptedBatchEngine):
        async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
            self.calls.append(list(items))
            return []

    await rig.worker(Stage.PREPROCESS, Short())
    task = chat_task(now_unix_s=rig.clock.unix_s())

    await rig.submit(task)
    await rig.clock.advance(2.0)

    assert (500, EngineError.code) == _failure(rig, task)


async def test_task_that_no_subject_can_answer_is_dead_lettered(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    task = msgspec.structs.replace(chat_task(now_unix_s=rig.clock.unix_s()), request_id="not a token")

    await rig.broker.connect().publish_work(PRE_SUBJECT, codec.encode(task), message_id="x", ttl_s=60.0)
    await rig.clock.advance(0.1)

    assert [letter.reason for letter in rig.broker.dead_letters] == ["undecodable"]


async def test_task_of_another_stage_is_dead_lettered(rig: Rig) -> None:
    await rig.worker(Stage.VISION_ENCODE, ScriptedBatchEngine())
    task = chat_task(now_unix_s=rig.clock.unix_s())
    subject = subjects.work(Stage.VISION_ENCODE, POOLS[Stage.VISION_ENCODE], PriorityClass.REALTIME)

    await rig.broker.connect().publish_work(subject, codec.encode(task), message_id="x", ttl_s=60.0)
    await rig.clock.advance(0.1)

    assert [letter.reason for letter in rig.broker.dead_letters] == ["wrong_stage"]


async def test_step_too_large_to_publish_fails_its_request_only(rig: Rig) -> None:
    many = {f"t{n}": np.zeros(1, dtype=np.uint8) for n in range(2000)}

    def bloated(item: StepItem) -> Product:
        return Product(tensors=many)

    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(bloated))
    task = chat_task(now_unix_s=rig.clock.unix_s())

    await rig.submit(task)
    await rig.clock.advance(2.0)

    assert _failure(rig, task)[0] == 500
    assert rig.tasks(Stage.PREPROCESS) == []
