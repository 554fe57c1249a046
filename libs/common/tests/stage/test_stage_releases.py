"""A fleet of two releases: work goes where it can be read, and comes back with its answer."""

from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest

from fleet_common.scheduling.route import refusing_pools, without_pools
from fleet_common.stage.intake import is_of_another_release
from fleet_common.stage.port import Product, StepItem
from fleet_common.testing.engines import ScriptedBatchEngine
from fleet_common.testing.plans import DEC, MODEL, POOLS, PRE, chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts import codec, subjects
from fleet_contracts.base import PriorityClass, Stage, WorkerId
from fleet_contracts.control import PoolRoute, Route, RoutingTable, WorkerInfo
from fleet_contracts.embed import EmbedParams, EmbedResult
from fleet_contracts.events import Finished, Usage
from fleet_contracts.preprocess import PreprocessParams, PreprocessResult
from fleet_contracts.work import Plan, PlanStep, StepTask

OLD_TAGS = ("step_task.v1",)
PRE_SUBJECT = subjects.work(Stage.PREPROCESS, POOLS[Stage.PREPROCESS], PriorityClass.REALTIME)
NEW_POOL = "dec-new"


def embed_plan() -> Plan:
    pre = PlanStep(step_id=PRE, stage=Stage.PREPROCESS, model=MODEL, params=PreprocessParams(route="embedding"))
    return Plan(steps=(pre, PlanStep(step_id=DEC, stage=Stage.DECODE, model=MODEL, params=EmbedParams(), needs=(PRE,))))


def embed_product(item: StepItem) -> Product:
    """What preprocess and an embedder make."""
    if item.task.step.stage is Stage.PREPROCESS:
        tensors = {"prompt": np.arange(3, dtype=np.int32), "lengths": np.asarray([1, 2], dtype=np.int32)}
        return Product(tensors=tensors, result=PreprocessResult(num_prompt_tokens=3))
    return Product(tensors={"vectors": np.ones((2, 64), dtype=np.float32)}, result=EmbedResult(num_prompt_tokens=3))


def later_release(task: StepTask) -> bytes:
    """The task as a later release would write it: with step parameters nobody here knows."""
    plain = msgpack.unpackb(codec.encode(task))
    plain["plan"]["steps"][-1]["params"] = {"type": "decode.v9", "anything": 1}
    return msgpack.packb(plain)


def worker(name: str, pool: str, tags: tuple[str, ...]) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(name),
        stage=Stage.DECODE,
        pool=pool,
        host="h",
        pid=1,
        state="ready",
        slots=4,
        locality="memory",
        accepted_tags=tags,
    )


async def test_the_answer_of_a_request_can_be_a_tensor(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(embed_product))
    engine = ScriptedBatchEngine(embed_product)
    await rig.worker(Stage.DECODE, engine)
    task = chat_task(now_unix_s=rig.clock.unix_s(), plan=embed_plan())

    await rig.submit(task)
    await rig.clock.advance(0.2)

    (finished,) = rig.ingress.view(task.request_id).terminal
    assert isinstance(finished, Finished)
    assert finished.usage == Usage(prompt_tokens=3, completion_tokens=0)
    with await rig.store.get(finished.outputs["vectors"]) as lease:
        assert lease.array.shape == (2, 64)
    assert set(engine.calls[0][0].tensors) == {(PRE, "prompt"), (PRE, "lengths")}


async def test_steps_that_embed_share_a_batch_whatever_their_lengths(rig: Rig) -> None:
    sizes = iter((3, 7))

    def preprocess(item: StepItem) -> Product:
        num = next(sizes)
        arrays = {"prompt": np.arange(num, dtype=np.int32), "lengths": np.asarray([num], dtype=np.int32)}
        return Product(tensors=arrays)

    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(preprocess, max_batch=1))
    for _ in range(2):
        await rig.submit(chat_task(now_unix_s=rig.clock.unix_s(), plan=embed_plan()))
    await rig.clock.advance(0.2)
    engine = ScriptedBatchEngine(embed_product)
    await rig.worker(Stage.DECODE, engine)
    await rig.clock.advance(0.2)

    assert [len(call) for call in engine.calls] == [2]


async def test_work_of_a_later_release_waits_for_a_worker_that_reads_it(rig: Rig) -> None:
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine())
    task = chat_task(now_unix_s=rig.clock.unix_s())
    payload = later_release(task)

    await rig.broker.connect().publish_work(PRE_SUBJECT, payload, message_id="x", ttl_s=60.0)
    await rig.clock.advance(0.1)

    assert rig.broker.dead_letters == []
    assert rig.broker.work.payloads([Stage.PREPROCESS]) == [payload]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"\xc1", False),
        (codec.encode(chat_task(now_unix_s=0.0)), False),
        (later_release(chat_task(now_unix_s=0.0)), True),
        (later_release(msgspec.structs.replace(chat_task(now_unix_s=0.0), request_id="no token")), False),
        (msgpack.packb({"type": "step_task.v9", "request_id": "r"}), False),
    ],
)
def test_another_release_is_told_from_rubbish(payload: bytes, expected: bool) -> None:
    assert is_of_another_release(payload) is expected


async def test_the_next_step_goes_to_a_pool_that_can_read_it(rig: Rig) -> None:
    pools = tuple(PoolRoute(pool=pool, weight_ratio=0.5, locality="memory") for pool in (POOLS[Stage.DECODE], NEW_POOL))
    pre = Route(
        stage=Stage.PREPROCESS,
        model=MODEL,
        pools=(PoolRoute(pool=POOLS[Stage.PREPROCESS], weight_ratio=1.0, locality="memory"),),
    )
    routes = (pre, Route(stage=Stage.DECODE, model=MODEL, pools=pools))
    await rig.set_table(RoutingTable(revision=2, made_unix_s=0.0, policy="test", routes=routes))
    registry = await rig.broker.connect().kv(subjects.BUCKET_REGISTRY)
    for info in (
        worker("old", POOLS[Stage.DECODE], OLD_TAGS),
        worker("new", NEW_POOL, codec.ACCEPTED_TAGS),
    ):
        await registry.put(f"worker.decode.{info.worker_id}", codec.encode(info), ttl_s=600.0)
    await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(embed_product))

    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s(), plan=embed_plan()))
    await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))
    await rig.clock.advance(0.2)

    # The rig picks the first pool that is left.
    by_pool = {message.subject.split(".")[3]: message for message in await _taken(rig)}
    assert codec.decode_task(by_pool[NEW_POOL].payload).plan.later_tags == {"embed.v1"}
    assert codec.decode_task(by_pool[POOLS[Stage.DECODE]].payload).plan.later_tags == frozenset()


async def _taken(rig: Rig) -> list:
    bus = rig.broker.connect()
    return [
        message
        for pool in (POOLS[Stage.DECODE], NEW_POOL)
        for message in await bus.take(Stage.DECODE, pool, PriorityClass.REALTIME, "any", 10)
    ]


def test_one_old_worker_makes_a_pool_refuse() -> None:
    workers = [
        worker("a", "mixed", OLD_TAGS),
        worker("b", "mixed", codec.ACCEPTED_TAGS),
        worker("c", "new", codec.ACCEPTED_TAGS),
    ]
    route = Route(
        stage=Stage.DECODE,
        model=MODEL,
        pools=tuple(PoolRoute(pool=pool, weight_ratio=0.5, locality="") for pool in ("mixed", "new")),
    )
    refusing = refusing_pools(workers, Stage.DECODE, frozenset({"embed.v1"}))

    assert refusing == {"mixed"}
    assert [pool.pool for pool in without_pools(route, refusing).pools] == ["new"]
    assert refusing_pools(workers, Stage.DECODE, frozenset()) == frozenset()
    assert refusing_pools(workers, Stage.PREPROCESS, frozenset({"embed.v1"})) == frozenset()
