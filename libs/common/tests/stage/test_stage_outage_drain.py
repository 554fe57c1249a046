"""Dependencies that go away, and workers that leave."""

from __future__ import annotations

import asyncio

from fleet_common.settings import RunnerSettings
from fleet_common.testing.clock import settle
from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine
from fleet_common.testing.plans import chat_task, one_pool_table
from fleet_common.testing.rig import Rig
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.control import RoutingTable


async def test_publish_outlasts_a_broker_outage_without_a_nak(rig: Rig) -> None:
    gate = asyncio.Event()
    engine = ScriptedBatchEngine(gate=gate.wait)
    worker = await rig.worker(Stage.PREPROCESS, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)

    rig.broker.go_down()
    gate.set()
    await rig.clock.advance(3.0)
    state_while_out = worker.runner.state
    await rig.broker.come_back()
    await rig.clock.advance(3.0)

    assert state_while_out == "paused"
    assert worker.runner.state == "ready"
    assert len(engine.calls) == 1
    assert [task.request_id] == [after.request_id for after in rig.tasks(Stage.DECODE)]
    assert rig.tasks(Stage.PREPROCESS) == []


async def test_paused_worker_pulls_nothing(rig: Rig) -> None:
    engine = ScriptedBatchEngine()
    worker = await rig.worker(Stage.PREPROCESS, engine)
    await rig.set_table(RoutingTable(revision=2, made_unix_s=0.0, policy="none"))

    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))
    await rig.clock.advance(1.0)
    waiting = len(rig.tasks(Stage.DECODE))
    await rig.set_table(one_pool_table(revision=3))
    await rig.clock.advance(3.0)

    assert waiting == 0
    assert len(rig.tasks(Stage.DECODE)) == 1, "published as soon as a table names a pool"
    assert worker.runner.num_held == 0


async def test_events_published_into_the_gap_are_sent_again_after_a_reconnect(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(), worker_id="p0")
    gates = {2: asyncio.Event(), 4: asyncio.Event()}

    async def before(item: object, number: int) -> None:
        if number in gates:
            await gates[number].wait()

    await rig.worker(Stage.DECODE, ScriptedStreamEngine(6, before_token=before))
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)
    await rig.clock.advance(0.1)
    view = rig.ingress.view(task.request_id)

    rig.broker.go_down()
    gates[2].set()
    await settle()
    before_the_return = list(view.tokens)
    await rig.broker.come_back()
    await settle()
    after_the_return = list(view.tokens)
    gates[4].set()
    await rig.clock.advance(1.0)

    assert before_the_return == [0, 1]
    assert after_the_return == [0, 1, 2, 3]
    assert view.tokens == [0, 1, 2, 3, 4, 5]
    assert len(view.terminal) == 1


async def test_drain_finishes_what_runs_and_gives_the_rest_to_others(rig: Rig) -> None:
    gate = asyncio.Event()
    leaving = ScriptedBatchEngine(max_batch=1, gate=gate.wait)
    worker = await rig.worker(Stage.PREPROCESS, leaving, slots=1)
    tasks = [chat_task(now_unix_s=rig.clock.unix_s()) for _ in range(3)]
    for task in tasks:
        await rig.submit(task)

    worker.runner.drain()
    state = worker.runner.state
    await settle()
    other = ScriptedBatchEngine()
    await rig.worker(Stage.PREPROCESS, other, worker_id="w1")
    await rig.clock.advance(0.5)
    gate.set()
    await rig.clock.advance(0.5)
    await worker.drained()

    assert state == "draining"
    assert [(i.task.solo, i.attempt.delivery) for call in other.calls for i in call] == [(False, 1), (False, 1)]
    assert [tasks[0].request_id] == [item.task.request_id for call in leaving.calls for item in call]
    assert len(rig.tasks(Stage.DECODE)) == 3
    assert rig.tasks(Stage.PREPROCESS) == []


async def test_drain_does_not_wait_longer_than_told(rig: Rig) -> None:
    never = asyncio.Event()
    worker = await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(gate=never.wait))
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)

    worker.runner.drain()
    await rig.clock.advance(rig.settings.drain_s + 1.0)
    await worker.drained()
    other = ScriptedBatchEngine()
    await rig.worker(Stage.PREPROCESS, other, worker_id="w1")
    await rig.clock.advance(0.5)

    assert [task.request_id] == [after.request_id for after in rig.tasks(Stage.DECODE)]


async def test_heartbeats_keep_queued_and_running_work(rig: Rig) -> None:
    gate = asyncio.Event()
    engine = ScriptedBatchEngine(max_batch=1, gate=gate.wait)
    await rig.worker(Stage.PREPROCESS, engine, slots=1)
    for _ in range(3):
        await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))

    await rig.clock.advance(40.0)
    gate.set()
    await rig.clock.advance(0.5)

    assert [item.attempt.delivery for call in engine.calls for item in call] == [1, 1, 1]


async def test_flood_of_one_class_does_not_keep_another_from_being_pulled(rig: Rig) -> None:
    gate = asyncio.Event()
    engine = ScriptedBatchEngine(max_batch=1, gate=gate.wait)
    worker = await rig.worker(Stage.PREPROCESS, engine, slots=1)
    now_unix_s = rig.clock.unix_s()
    for _ in range(50):
        await rig.submit(chat_task(now_unix_s=now_unix_s, priority_class=PriorityClass.REALTIME))

    await rig.submit(chat_task(now_unix_s=now_unix_s, priority_class=PriorityClass.BACKGROUND))
    await rig.clock.advance(1.0)

    assert worker.runner.queued()["background"] == 1
    assert worker.runner.num_held <= 12
    gate.set()


async def test_batch_is_filled_while_the_engine_is_busy(rig: Rig) -> None:
    gate = asyncio.Event()
    engine = ScriptedBatchEngine(max_batch=4, gate=gate.wait)
    await rig.worker(Stage.PREPROCESS, engine)

    for _ in range(9):
        await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))
    gate.set()
    await rig.clock.advance(0.5)

    assert engine.batch_sizes() == [1, 4, 4]


async def test_silent_ingress_does_not_pause_the_worker() -> None:
    rig = Rig(settings=RunnerSettings.model_validate({"confirm_timeout_s": 0.05}))
    await rig.start()
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(), worker_id="p0")
    worker = await rig.worker(Stage.DECODE, ScriptedStreamEngine(2))
    rig.ingress.ignore_terminal = 1000
    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))

    # A request that nobody answers times out on the real clock.
    await asyncio.sleep(rig.settings.confirm_timeout_s + 0.05)
    await settle()

    state, num_held = worker.runner.state, worker.runner.num_held
    await rig.stop()

    assert (state, num_held) == ("ready", 1)


async def test_connection_lost_again_while_events_are_sent_again_ends_nothing(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(), worker_id="p0")
    gate = asyncio.Event()

    async def before(item: object, number: int) -> None:
        if number == 2:
            await gate.wait()

    worker = await rig.worker(Stage.DECODE, ScriptedStreamEngine(4, before_token=before))
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)
    await rig.clock.advance(0.1)

    rig.broker.go_down()
    await worker.bus.reconnected()
    await settle()
    await rig.broker.come_back()
    gate.set()
    await rig.clock.advance(1.0)

    assert not worker.job.done()
    assert rig.ingress.view(task.request_id).tokens == [0, 1, 2, 3]
