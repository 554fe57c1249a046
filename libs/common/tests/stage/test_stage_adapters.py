"""A step with a LoRA adapter goes where the adapter is in memory already."""

from __future__ import annotations

import msgspec

from fleet_common.testing.engines import ScriptedBatchEngine, default_product
from fleet_common.testing.plans import POOLS, chat_plan, chat_task, one_pool_table
from fleet_common.testing.rig import Rig
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import WorkerInfo
from fleet_contracts.decode import DecodeParams
from fleet_contracts.work import Plan, StepTask

WORKERS = (WorkerId("d0"), WorkerId("d1"))


async def register(rig: Rig, worker_id: WorkerId, *adapters: str, state: str = "ready") -> None:
    info = WorkerInfo(
        worker_id=worker_id,
        stage=Stage.DECODE,
        pool=POOLS[Stage.DECODE],
        host="h",
        pid=1,
        state=state,
        slots=1,
        locality="memory",
        adapters=adapters,
    )
    bucket = await rig.broker.connect().kv(subjects.BUCKET_REGISTRY)
    await bucket.put(f"worker.decode.{worker_id}", codec.encode(info), 1000.0)


async def published(rig: Rig, adapter: str) -> StepTask:
    """The decode step that follows a prompt."""
    plan = chat_plan(0)
    decode = msgspec.structs.replace(plan.steps[-1], params=DecodeParams(adapter=adapter))
    await rig.set_table(one_pool_table(workers=WORKERS, revision=2))
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(default_product))
    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s(), plan=Plan(steps=(plan.steps[0], decode))))
    await rig.clock.advance(0.1)
    (task,) = rig.tasks(Stage.DECODE)
    return task


async def test_the_lane_is_that_of_the_worker_that_holds_the_adapter(rig: Rig) -> None:
    await register(rig, WORKERS[0], "poet")
    await register(rig, WORKERS[1], "poet", "pirate")

    task = await published(rig, "pirate")

    assert task.lane == "w-d1"


async def test_a_step_without_an_adapter_goes_to_any_worker(rig: Rig) -> None:
    await register(rig, WORKERS[1], "pirate")

    task = await published(rig, "")

    assert task.lane == "any"


async def test_a_worker_that_takes_no_work_is_not_preferred(rig: Rig) -> None:
    await register(rig, WORKERS[1], "pirate", state="draining")

    task = await published(rig, "pirate")

    assert task.lane == "any"
