"""Work nobody waits for: cancelled, late, or without its ingress."""

from __future__ import annotations

import asyncio

from fleet_common.stage.view import IngressWatch
from fleet_common.testing.clock import settle
from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine
from fleet_common.testing.plans import chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage
from fleet_contracts.events import Failed
from fleet_contracts.work import Cancel, StepTask


async def _broadcast(rig: Rig, task: StepTask) -> None:
    cancel = Cancel(request_id=task.request_id, reason="client left", deadline_unix_s=task.deadline_unix_s)
    await rig.broker.connect().publish(subjects.CANCEL, codec.encode(cancel))
    await settle()


async def _bury(rig: Rig, task: StepTask) -> None:
    cancel = Cancel(request_id=task.request_id, reason="client left", deadline_unix_s=task.deadline_unix_s)
    bucket = await rig.broker.connect().kv(subjects.BUCKET_TOMBSTONES)
    await bucket.put(task.request_id, codec.encode(cancel), 60.0)
    await settle()


async def _hanging_stream(rig: Rig) -> tuple[StepTask, ScriptedStreamEngine]:
    never = asyncio.Event()

    async def hang(item: object, number: int) -> None:
        if number == 1:
            await never.wait()

    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(), worker_id="p0")
    engine = ScriptedStreamEngine(before_token=hang)
    await rig.worker(Stage.DECODE, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s(), timeout_s=20.0)
    await rig.submit(task)
    await rig.clock.advance(0.1)
    return task, engine


async def test_broadcast_stops_even_a_hanging_engine_within_two_seconds(rig: Rig) -> None:
    task, engine = await _hanging_stream(rig)

    await _broadcast(rig, task)
    await rig.clock.advance(2.0)

    assert engine.running() == 0
    assert rig.tasks(Stage.DECODE) == []
    assert rig.ingress.view(task.request_id).terminal == []


async def test_tombstone_alone_stops_a_stream(rig: Rig) -> None:
    task, engine = await _hanging_stream(rig)

    await _bury(rig, task)
    await rig.clock.advance(2.0)

    assert engine.running() == 0
    assert rig.tasks(Stage.DECODE) == []


async def test_cancelled_work_is_acked_on_arrival(rig: Rig) -> None:
    engine = ScriptedBatchEngine()
    await rig.worker(Stage.PREPROCESS, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await _bury(rig, task)

    await rig.submit(task)
    await rig.clock.advance(0.1)

    assert engine.calls == []
    assert rig.tasks(Stage.PREPROCESS) == []


async def test_cancelled_work_that_waits_is_acked_at_once(rig: Rig) -> None:
    gate = asyncio.Event()
    engine = ScriptedBatchEngine(max_batch=1, gate=gate.wait)
    await rig.worker(Stage.PREPROCESS, engine, slots=1)
    running, waiting = (chat_task(now_unix_s=rig.clock.unix_s()) for _ in range(2))
    await rig.submit(running)
    await rig.submit(waiting)

    await _broadcast(rig, waiting)

    assert [running.request_id] == [task.request_id for task in rig.tasks(Stage.PREPROCESS)]
    gate.set()


async def test_late_work_fails_with_504(rig: Rig) -> None:
    engine = ScriptedBatchEngine()
    task = chat_task(now_unix_s=rig.clock.unix_s(), timeout_s=1.0)
    await rig.submit(task)
    await rig.clock.advance(2.0)

    await rig.worker(Stage.PREPROCESS, engine)
    await rig.clock.advance(0.1)

    (event,) = rig.ingress.view(task.request_id).terminal
    assert isinstance(event, Failed)
    assert (event.failure.status, event.failure.code) == (504, "deadline_exceeded")
    assert engine.calls == []
    assert rig.tasks(Stage.PREPROCESS) == []


async def test_stream_that_passes_its_deadline_fails_with_504(rig: Rig) -> None:
    task, engine = await _hanging_stream(rig)

    await rig.clock.advance(22.0)

    (event,) = rig.ingress.view(task.request_id).terminal
    assert isinstance(event, Failed)
    assert event.failure.status == 504
    assert engine.running() == 0
    assert rig.tasks(Stage.DECODE) == []


async def test_work_dies_with_its_ingress_once_the_grace_is_over(rig: Rig) -> None:
    _task, engine = await _hanging_stream(rig)
    await rig.ingress.stop()
    await (await rig.broker.connect().kv(subjects.BUCKET_REGISTRY)).delete(f"ingress.{rig.ingress.ingress_id}")

    await rig.clock.advance(rig.settings.lease_s)
    running_within_the_grace = engine.running()
    await rig.clock.advance(rig.settings.lease_s + 3.0)

    assert running_within_the_grace == 1
    assert engine.running() == 0
    assert rig.tasks(Stage.DECODE) == []


def test_unknown_ingress_is_not_gone_at_first_sight() -> None:
    watch = IngressWatch(grace_s=8.0)

    assert not watch.is_gone("i", now_s=100.0)
    assert not watch.is_gone("i", now_s=107.0)
    assert watch.is_gone("i", now_s=109.0)


def test_absence_counts_from_the_return_of_the_control_plane() -> None:
    watch = IngressWatch(grace_s=8.0)
    watch.lost("i", now_s=0.0)

    watch.start_again(now_s=100.0)

    assert not watch.is_gone("i", now_s=101.0)
    watch.seen("i")
    assert not watch.is_gone("i", now_s=1000.0)
