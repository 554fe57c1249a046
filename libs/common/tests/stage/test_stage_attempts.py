"""More than one attempt at a step: claims, continuation, fences, adoption."""

from __future__ import annotations

import asyncio

import msgspec

from fleet_common.stage.port import StepItem
from fleet_common.testing.clock import settle
from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine
from fleet_common.testing.plans import POOLS, chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage
from fleet_contracts.events import Claim, Finished, RootLost, StepDone, Token
from fleet_contracts.work import RESUBMIT_STRIDE, StepTask


class StopsAt:
    """Lets tokens before number `stop` through, then waits for `go`."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.go = asyncio.Event()

    async def __call__(self, item: StepItem, number: int) -> None:
        if number >= self.stop:
            await self.go.wait()


async def _decode_task(rig: Rig) -> StepTask:
    """A request whose decode step waits in the stream."""
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(), worker_id="p0")
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)
    await rig.clock.advance(0.1)
    return rig.tasks(Stage.DECODE)[0]


async def test_second_attempt_claims_and_continues_without_a_seam(rig: Rig) -> None:
    task = await _decode_task(rig)
    first = await rig.worker(Stage.DECODE, ScriptedStreamEngine(6, before_token=StopsAt(3)))
    await rig.clock.advance(0.1)
    await first.kill()
    second = ScriptedStreamEngine(6)
    await rig.worker(Stage.DECODE, second, worker_id="w1")

    await rig.clock.advance(rig.settings.ack_wait_s + 1.0)

    view = rig.ingress.view(task.request_id)
    assert view.tokens == [0, 1, 2, 3, 4, 5]
    assert [claim.attempt.delivery for claim in view.claims] == [2]
    (event,) = view.terminal
    assert isinstance(event, Finished)
    assert event.num_tokens == (6,)


async def test_first_attempt_does_not_claim(rig: Rig) -> None:
    task = await _decode_task(rig)

    await rig.worker(Stage.DECODE, ScriptedStreamEngine(2))
    await rig.clock.advance(0.1)

    assert rig.ingress.view(task.request_id).claims == []


async def test_attempt_whose_claim_is_stale_acks_and_drops(rig: Rig) -> None:
    task = await _decode_task(rig)
    view = rig.ingress.view(task.request_id)
    engine = ScriptedStreamEngine(2)
    first = await rig.worker(Stage.DECODE, ScriptedStreamEngine(6, before_token=StopsAt(1)))
    await rig.clock.advance(0.1)
    await first.kill()
    view.steps["dec"].fence = (RESUBMIT_STRIDE, 1)

    await rig.worker(Stage.DECODE, engine, worker_id="w1")
    await rig.clock.advance(rig.settings.ack_wait_s + 1.0)

    assert engine.started == []
    assert view.terminal == []
    assert rig.tasks(Stage.DECODE) == []


async def test_higher_epoch_replaces_the_attempt_that_runs(rig: Rig) -> None:
    task = await _decode_task(rig)
    gate = StopsAt(2)
    engine = ScriptedStreamEngine(4, before_token=gate)
    await rig.worker(Stage.DECODE, engine)
    await rig.clock.advance(0.1)

    newer = msgspec.structs.replace(task, epoch=task.epoch + 1)
    await rig.submit(newer)
    await settle()
    gate.go.set()
    await rig.clock.advance(1.0)

    view = rig.ingress.view(task.request_id)
    assert view.tokens == [0, 1, 2, 3]
    assert [event.attempt.epoch for event in view.terminal] == [1]
    assert rig.tasks(Stage.DECODE) == []


async def test_redelivery_of_the_running_message_is_adopted(rig: Rig) -> None:
    task = await _decode_task(rig)
    gate = StopsAt(2)
    engine = ScriptedStreamEngine(4, before_token=gate)
    worker = await rig.worker(Stage.DECODE, engine)
    await rig.clock.advance(0.1)

    rig.broker.redeliver()
    await settle()
    gate.go.set()
    await rig.clock.advance(0.5)

    view = rig.ingress.view(task.request_id)
    assert len(engine.started) == 1
    assert len(view.terminal) == 1
    assert worker.runner.num_held == 0
    assert rig.tasks(Stage.DECODE) == []


async def test_lost_events_are_sent_again_when_the_ingress_asks(rig: Rig) -> None:
    task = await _decode_task(rig)
    lost: list[int] = []

    def lose(event: object) -> bool:
        if isinstance(event, Token) and event.index == 2 and not lost:
            lost.append(event.seq)
            return True
        return False

    rig.ingress.lose = lose
    await rig.worker(Stage.DECODE, ScriptedStreamEngine(5))
    await rig.clock.advance(0.5)

    view = rig.ingress.view(task.request_id)
    assert view.tokens == [0, 1, 2, 3, 4]
    assert view.num_resends == 1
    assert len(view.terminal) == 1


async def test_unanswered_end_is_told_again_and_acked_only_then(rig: Rig) -> None:
    task = await _decode_task(rig)
    await rig.ingress.stop()
    await rig.worker(Stage.DECODE, ScriptedStreamEngine(2))
    await rig.clock.advance(3.0)
    held_without_answer = len(rig.tasks(Stage.DECODE))

    await rig.ingress.start()
    await rig.clock.advance(5.0)

    assert held_without_answer == 1
    assert len(rig.ingress.view(task.request_id).terminal) == 1
    assert rig.tasks(Stage.DECODE) == []


async def test_sequence_numbers_have_no_gap_and_step_done_comes_before_the_end(rig: Rig) -> None:
    task = await _decode_task(rig)
    await rig.worker(Stage.DECODE, ScriptedStreamEngine(3))
    await rig.clock.advance(0.1)

    prefix = subjects.event(task.events.ingress_id, task.request_id, task.events.nonce)
    events = [codec.decode_worker_message(raw) for subject, raw in rig.broker.published if subject == prefix]
    own = [event for event in events if event.attempt.step_id == "dec"]
    assert list(range(6)) == [event.seq for event in own]
    assert isinstance(own[-2], StepDone)
    assert isinstance(own[-1], Finished)


async def test_frozen_worker_stops_what_was_taken_over_and_acks_none_of_it(rig: Rig) -> None:
    task = await _decode_task(rig)
    gate = StopsAt(2)
    frozen = ScriptedStreamEngine(5, before_token=gate, slots=1)
    await rig.worker(Stage.DECODE, frozen, slots=1)
    waiting = msgspec.structs.replace(task, request_id="ing0_waiting")
    await rig.submit(waiting)
    await rig.clock.advance(0.1)
    view = rig.ingress.view(task.request_id)
    view.steps["dec"].fence = (0, 2)

    rig.clock.jump(rig.settings.ack_wait_s + 2.0)
    await rig.clock.advance(2.0)
    gate.go.set()
    await rig.clock.advance(0.1)

    assert view.tokens == [0, 1]
    assert view.terminal == []
    assert task.request_id in {left.request_id for left in rig.tasks(Stage.DECODE)}


async def test_slow_step_shows_the_ingress_that_it_lives(rig: Rig) -> None:
    gate = asyncio.Event()
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(gate=gate.wait))
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)

    await rig.clock.advance(4 * rig.settings.heartbeat_s + 0.1)
    gate.set()
    await rig.clock.advance(0.1)

    own = [codec.decode_worker_message(raw) for subject, raw in rig.broker.published if task.request_id in subject]
    assert [type(event).__name__ for event in own] == ["Started", "Progress", "Progress", "Progress", "StepDone"]
    assert [event.seq for event in own if not isinstance(event, Claim | RootLost)] == [0, 1, 2, 3, 4]


async def test_delivery_of_a_step_finished_here_is_acked_without_running_again(rig: Rig) -> None:
    engine = ScriptedBatchEngine()
    await rig.worker(Stage.PREPROCESS, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s())
    await rig.submit(task)
    await rig.clock.advance(0.1)

    # The broker lost the ack: the same step comes again.
    subject = subjects.work(Stage.PREPROCESS, POOLS[Stage.PREPROCESS], task.priority_class)
    await rig.broker.connect().publish_work(subject, codec.encode(task), message_id="again", ttl_s=60.0)
    await rig.clock.advance(0.1)

    assert len(engine.calls) == 1
    assert rig.tasks(Stage.PREPROCESS) == []
