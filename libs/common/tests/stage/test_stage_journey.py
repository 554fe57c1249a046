"""A request through three workers, and the joins between them."""

from __future__ import annotations

from fleet_common.testing.engines import ScriptedBatchEngine, ScriptedStreamEngine
from fleet_common.testing.plans import chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts.base import Stage
from fleet_contracts.events import Finished


async def test_text_request_runs_from_preprocess_to_decode(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    decode = ScriptedStreamEngine(num_tokens=3)
    await rig.worker(Stage.DECODE, decode)
    task = chat_task(now_unix_s=rig.clock.unix_s())

    await rig.submit(task)
    await rig.clock.advance(0.1)

    view = rig.ingress.view(task.request_id)
    assert view.tokens == [0, 1, 2]
    assert view.texts == ["<0>", "<1>", "<2>"]
    assert [Finished] == [type(event) for event in view.terminal]
    assert [event.attempt.step_id for event in view.done] == ["pre", "dec"]
    assert list(decode.started[0].tensors) == [("pre", "prompt")]
    assert rig.tasks(Stage.PREPROCESS) + rig.tasks(Stage.DECODE) == []


async def test_two_pictures_are_joined_before_decode(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    vision = ScriptedBatchEngine()
    await rig.worker(Stage.VISION_ENCODE, vision)
    decode = ScriptedStreamEngine()
    await rig.worker(Stage.DECODE, decode)
    task = chat_task(now_unix_s=rig.clock.unix_s(), num_images=2)

    await rig.submit(task)
    await rig.clock.advance(0.2)

    assert {("pre", "prompt"), ("enc0", "embeds0"), ("enc1", "embeds1")} == set(decode.started[0].tensors)
    assert len(decode.started) == 1
    assert len(rig.ingress.view(task.request_id).terminal) == 1
    pixels = {name for call in vision.calls for item in call for name in item.tensors}
    assert {("pre", "pixels0"), ("pre", "pixels1")} == pixels


async def test_finished_request_leaves_no_tensor_behind(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    await rig.worker(Stage.VISION_ENCODE, ScriptedBatchEngine())
    await rig.worker(Stage.DECODE, ScriptedStreamEngine())

    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s(), num_images=2))
    await rig.clock.advance(0.2)

    assert sum(stats.used_bytes for stats in rig.store.stats().values()) == 0
