"""Tensors that are gone are derived again, at a higher epoch."""

from __future__ import annotations

import msgspec
import numpy as np

from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine
from fleet_common.testing.fake_ingress import resubmitted
from fleet_common.testing.plans import chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage
from fleet_contracts.work import RESUBMIT_STRIDE, JoinRecord, StepTask


async def test_missing_embeddings_are_encoded_again(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    vision = ScriptedBatchEngine()
    await rig.worker(Stage.VISION_ENCODE, vision)
    task = chat_task(now_unix_s=rig.clock.unix_s(), num_images=1)
    await rig.submit(task)
    await rig.clock.advance(0.1)
    waiting = rig.tasks(Stage.DECODE)[0]
    await rig.store.release(waiting.inputs["enc0"].tensors["embeds0"])

    decode = ScriptedStreamEngine(num_tokens=2)
    await rig.worker(Stage.DECODE, decode)
    await rig.clock.advance(0.2)

    view = rig.ingress.view(task.request_id)
    assert view.tokens == [0, 1]
    assert len(view.terminal) == 1
    assert [item.attempt.epoch for item in decode.started] == [4], "pre at 2 plus enc0 at 2"
    # Its pixels were freed with the first encoding, so preprocess ran again as well.
    assert [event.attempt.step_id for event in view.done] == ["pre", "enc0", "pre", "enc0", "dec"]


async def test_lost_root_is_reported_to_the_ingress_and_acked(rig: Rig) -> None:
    root = await rig.store.put(np.zeros(500, dtype=np.uint8), ttl_s=60.0)
    await rig.store.release(root)
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(needs_root=True))
    task = chat_task(now_unix_s=rig.clock.unix_s(), root=root)

    await rig.submit(task)
    await rig.clock.advance(0.1)

    assert [task.request_id] == [lost.attempt.request_id for lost in rig.ingress.root_lost]
    assert rig.tasks(Stage.PREPROCESS) == []


async def test_root_is_handed_to_an_engine_that_needs_it(rig: Rig) -> None:
    root = await rig.store.put(np.frombuffer(b"x" * 500, dtype=np.uint8), ttl_s=60.0)
    engine = ScriptedBatchEngine(needs_root=True)
    await rig.worker(Stage.PREPROCESS, engine)

    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s(), root=root))
    await rig.clock.advance(0.1)

    assert engine.calls[0][0].root == b"x" * 500


async def test_encoding_again_replaces_its_input_in_the_join(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    await rig.worker(Stage.VISION_ENCODE, ScriptedBatchEngine())
    task = chat_task(now_unix_s=rig.clock.unix_s(), num_images=2)
    await rig.submit(task)
    await rig.clock.advance(0.1)
    waiting = rig.tasks(Stage.DECODE)[0]
    await rig.store.release(waiting.inputs["enc1"].tensors["embeds1"])

    decode = ScriptedStreamEngine(num_tokens=1)
    await rig.worker(Stage.DECODE, decode)
    await rig.clock.advance(1.0)

    assert len(rig.ingress.view(task.request_id).terminal) == 1
    joins = rig.broker.bucket(subjects.BUCKET_JOINS).contents()
    record: JoinRecord = codec.decode_join(joins[f"{task.request_id}.dec"])
    assert record.inputs["enc1"].epoch >= 1
    assert rig.tasks(Stage.DECODE) == []


async def test_death_between_merge_and_publish_loses_nothing(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    first = await rig.worker(Stage.VISION_ENCODE, ScriptedBatchEngine())
    task = chat_task(now_unix_s=rig.clock.unix_s(), num_images=2)
    await rig.submit(task)
    await rig.clock.advance(0.1)
    published = rig.tasks(Stage.DECODE)
    decode = ScriptedStreamEngine()
    await rig.worker(Stage.DECODE, decode)
    await rig.clock.advance(0.1)
    await first.kill()

    # The record is complete; the step that completed it runs again, as if its worker had died before publishing.
    again = ScriptedBatchEngine()
    await rig.worker(Stage.VISION_ENCODE, again, worker_id="w1")
    last = _encode_task(published[0], "enc1")
    await rig.broker.connect().publish_work(
        subjects.work(Stage.VISION_ENCODE, "vis-p", last.priority_class),
        codec.encode(last),
        message_id="as-redelivered",
        ttl_s=60.0,
    )
    await rig.clock.advance(0.2)

    assert len(published) == 1
    assert len(decode.started) == 1, "the second publish carries the same message id"
    assert rig.tasks(Stage.VISION_ENCODE) == []


def _encode_task(decode_task: StepTask, step_id: str) -> StepTask:
    return msgspec.structs.replace(decode_task, step_id=step_id, epoch=0, inputs={"pre": decode_task.inputs["pre"]})


async def test_request_submitted_again_is_decoded_once_more_and_only_once(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    await rig.worker(Stage.VISION_ENCODE, ScriptedBatchEngine(max_batch=1), slots=1)
    task = chat_task(now_unix_s=rig.clock.unix_s(), num_images=2)
    await rig.submit(task)
    await rig.clock.advance(0.1)

    await rig.submit(resubmitted(task))
    await rig.clock.advance(0.1)

    assert sorted(waiting.epoch for waiting in rig.tasks(Stage.DECODE)) == [0, 3 * RESUBMIT_STRIDE]
