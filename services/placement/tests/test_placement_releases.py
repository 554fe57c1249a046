"""The mover in a fleet of two releases: it reads what it can of later work, and never moves work to who cannot."""

from __future__ import annotations

import msgpack
import pytest

from fleet_common.bus.memory import MemoryBroker
from fleet_common.bus.port import BusMessage
from fleet_common.telemetry.names import PlacementMetrics
from fleet_common.testing.clock import ManualClock
from fleet_contracts import codec, subjects
from fleet_contracts.base import IngressId, PriorityClass, RequestId, Stage, StepId, WorkerId
from fleet_contracts.control import ModelCard, WorkerInfo
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import Confirm, Failed, WorkerMessage
from fleet_contracts.work import EventAddress, Plan, PlanStep, StepTask
from fleet_placement.core.moves import Backlog, Stranded, target_pool
from fleet_placement.core.state import PlacementState, WorkerRecord
from fleet_placement.mover import Mover

REALTIME = PriorityClass.REALTIME
TAGS = frozenset({"embed.v1"})


def later_work() -> bytes:
    """A work item with step parameters of a release to come."""
    step = PlanStep(step_id=StepId("dec"), stage=Stage.DECODE, model="chat", params=DecodeParams())
    task = StepTask(
        request_id=RequestId("i_r1"),
        step_id=StepId("dec"),
        epoch=3,
        plan=Plan(steps=(step,)),
        model="chat",
        priority_class=REALTIME,
        tenant="t",
        deadline_unix_s=300.0,
        enqueued_unix_s=0.0,
        events=EventAddress(ingress_id=IngressId("i"), nonce="n"),
    )
    plain = msgpack.unpackb(codec.encode(task))
    plain["plan"]["steps"][0]["params"] = {"type": "decode.v9"}
    payload: bytes = msgpack.packb(plain)
    return payload


def record(name: str, pool: str, tags: tuple[str, ...]) -> WorkerRecord:
    info = WorkerInfo(
        worker_id=WorkerId(name),
        stage=Stage.DECODE,
        pool=pool,
        host="h",
        pid=1,
        state="ready",
        slots=4,
        locality="boot",
        cards=(ModelCard(model="chat"),),
        accepted_tags=tags,
    )
    return WorkerRecord(info=info, joined_s=0.0)


@pytest.mark.parametrize(("tags", "pool"), [(frozenset(), "a-old"), (TAGS, "new"), (frozenset({"decode.v9"}), None)])
def test_stranded_work_moves_only_to_those_who_can_read_it(tags: frozenset[str], pool: str | None) -> None:
    records = [record("a", "a-old", ("step_task.v1",)), record("b", "new", codec.ACCEPTED_TAGS)]
    state = PlacementState(workers={one.info.worker_id: one for one in records})
    queue = Stranded(Backlog(Stage.DECODE, "empty", REALTIME, "any", 1), "pool")

    assert target_pool(state, queue, "chat", tags) == pool


async def test_the_client_of_work_nobody_could_read_is_told() -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock)
    clock.on_move = broker.tick
    bus = broker.connect()
    heard: list[WorkerMessage] = []

    async def answer(message: BusMessage) -> None:
        heard.append(codec.decode_worker_message(message.payload))
        await bus.respond(message, codec.encode(Confirm(status="accepted")))

    await bus.subscribe(subjects.events_of(IngressId("i")), answer)
    subject = subjects.work(Stage.DECODE, "decode-a", REALTIME)
    await bus.publish_work(subject, later_work(), message_id="m", ttl_s=300.0)
    mover = Mover(bus, PlacementState, PlacementMetrics(), clock, batch=10)
    await bus.max_deliveries(mover.bury)
    for _ in range(broker.limits.max_deliver):
        await bus.take(Stage.DECODE, "decode-a", REALTIME, "any", 1)
        broker.redeliver()
    await clock.advance(1.0)

    (failed,) = heard
    assert isinstance(failed, Failed)
    assert (failed.attempt.request_id, failed.attempt.step_id, failed.attempt.stage) == ("i_r1", "dec", Stage.DECODE)
    assert [letter.payload for letter in broker.dead_letters] == [later_work()]
