"""Placement on a memory bus, with a clock driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from fleet_common.bus.memory import MemoryBroker, MemoryBus
from fleet_common.bus.port import BusMessage
from fleet_common.telemetry.names import PlacementMetrics
from fleet_common.testing.clock import ManualClock
from fleet_contracts import codec, subjects
from fleet_contracts.base import IngressId, PriorityClass, RequestId, Stage, StepId, WorkerId
from fleet_contracts.control import IngressInfo, ModelCard, RoutingTable, Telemetry, WorkerInfo
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import Confirm, Failed, WorkerMessage
from fleet_contracts.work import MOVE_STRIDE, EventAddress, Plan, PlanStep, StepTask
from fleet_placement.app import UnknownPolicyError, build_service, placement_config
from fleet_placement.service import PlacementService
from fleet_placement.settings import PlacementSettings

REALTIME = PriorityClass.REALTIME


class Rig:
    """A broker, its clock, and helpers that speak as workers and ingresses do."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.clock.on_move = self.broker.tick
        self.bus = self.broker.connect()

    @asynccontextmanager
    async def placement(
        self, name: str = "placement-a", clock: ManualClock | None = None, settings: PlacementSettings | None = None
    ) -> AsyncIterator[tuple[PlacementService, MemoryBus]]:
        """A running instance; with a clock of its own it can be frozen."""
        bus = self.broker.connect()
        clock = clock or self.clock
        settings = settings or PlacementSettings(instance_id=name)
        service = await build_service(settings, bus, PlacementMetrics(), clock)
        running = asyncio.get_running_loop().create_task(service.run())
        await self.clock.advance(0.0)
        try:
            yield service, bus
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def register(self, name: str, pool: str = "decode-a", state: str = "ready") -> None:
        info = WorkerInfo(
            worker_id=WorkerId(name),
            stage=Stage.DECODE,
            pool=pool,
            host="h",
            pid=1,
            state=state,
            slots=4,
            locality="boot",
            cards=(ModelCard(model="chat"),),
        )
        registry = await self.bus.kv(subjects.BUCKET_REGISTRY)
        await registry.put(f"worker.decode.{name}", codec.encode(info), ttl_s=10_000.0)

    async def deregister(self, name: str) -> None:
        registry = await self.bus.kv(subjects.BUCKET_REGISTRY)
        await registry.delete(f"worker.decode.{name}")

    async def report(self, service_s: dict[str, float], seconds: int) -> None:
        for _ in range(seconds):
            for name, value in service_s.items():
                report = Telemetry(
                    worker_id=WorkerId(name),
                    stage=Stage.DECODE,
                    pool="decode-a",
                    sent_unix_s=self.clock.unix_s(),
                    slots=4,
                    state="ready",
                    service_s=value,
                )
                await self.bus.publish(subjects.telemetry(Stage.DECODE, WorkerId(name)), codec.encode(report))
            await self.clock.advance(1.0)

    async def table(self) -> RoutingTable:
        entry = await (await self.bus.kv(subjects.BUCKET_ROUTING)).get(subjects.ROUTING_KEY)
        assert entry is not None
        return codec.decode_table(entry.value)

    async def shares(self) -> dict[str, float]:
        table = await self.table()
        return {
            share.worker_id: share.share_ratio
            for route in table.routes
            for pool in route.pools
            for share in pool.workers
        }

    async def submit(self, pool: str, lane: str = "any", request: str = "i_r1") -> StepTask:
        task = StepTask(
            request_id=RequestId(request),
            step_id=StepId("dec"),
            epoch=3,
            plan=Plan(
                steps=(PlanStep(step_id=StepId("dec"), stage=Stage.DECODE, model="chat", params=DecodeParams()),)
            ),
            model="chat",
            priority_class=REALTIME,
            tenant="t",
            deadline_unix_s=self.clock.unix_s() + 300.0,
            enqueued_unix_s=self.clock.unix_s(),
            events=EventAddress(ingress_id=IngressId("i"), nonce="n"),
            lane=lane,
        )
        subject = subjects.work(Stage.DECODE, pool, REALTIME, lane)
        message_id = subjects.message_id(task.request_id, task.step_id, task.epoch)
        await self.bus.publish_work(subject, codec.encode(task), message_id=message_id, ttl_s=360.0)
        return task

    async def waiting(self, pool: str, lane: str = "any") -> list[StepTask]:
        messages = await self.bus.take(Stage.DECODE, pool, REALTIME, lane, 100)
        return [codec.decode_task(message.payload) for message in messages]


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_table_is_published_when_a_worker_joins_and_leaves(rig: Rig) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        await rig.register("decode-1")
        await rig.clock.advance(0.5)
        assert await rig.shares() == {"decode-0": 0.5, "decode-1": 0.5}

        await rig.deregister("decode-1")
        await rig.clock.advance(1.0)

        assert await rig.shares() == {"decode-0": 1.0}
        table = await rig.table()
        assert table.made_unix_s > 0.0
        assert "decode-1 is gone, share 0.50 -> 0.00" in table.reasons


async def test_measured_load_moves_shares(rig: Rig) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        await rig.register("decode-1")
        await rig.report({"decode-0": 0.1, "decode-1": 0.1}, 6)
        before = await rig.table()

        await rig.report({"decode-0": 0.1, "decode-1": 0.4}, 10)

        assert (await rig.shares())["decode-1"] < 0.3
        assert (await rig.table()).revision - before.revision <= 2


async def test_a_stand_by_takes_over_within_the_lease_of_a_frozen_leader(rig: Rig) -> None:
    frozen = ManualClock()
    async with rig.placement("placement-a", frozen) as (first, _):
        await rig.register("decode-0")
        await rig.clock.advance(0.5)
        revision = (await rig.table()).revision
        async with rig.placement("placement-b") as (second, _):
            assert (first.is_leading, second.is_leading) == (True, False)

            await rig.clock.advance(6.0)
            assert second.is_leading
            await frozen.advance(6.0)
            assert not first.is_leading

            await rig.register("decode-1")
            await rig.clock.advance(0.5)
            assert (await rig.table()).revision == revision + 1


async def test_a_leader_that_stops_hands_over_at_once(rig: Rig) -> None:
    async with rig.placement("placement-b") as (second, _):
        await rig.clock.advance(0.5)
    async with rig.placement("placement-c") as (third, _):
        await rig.clock.advance(0.5)

        assert (second.is_leading, third.is_leading) == (False, True)


async def test_a_deposed_leader_cannot_overwrite_its_successors_table(rig: Rig) -> None:
    async with rig.placement() as (service, _):
        await rig.register("decode-0")
        await rig.clock.advance(0.5)
        successor = RoutingTable(revision=99, made_unix_s=1.0, policy="static")
        await (await rig.bus.kv(subjects.BUCKET_ROUTING)).put(subjects.ROUTING_KEY, codec.encode(successor))

        await rig.register("decode-1")
        await rig.clock.advance(0.25)
        assert not service.is_leading

        await rig.clock.advance(30.0)
        # It read what its successor wrote, and goes on from there.
        assert service.is_leading
        assert (await rig.table()).revision >= 100


@pytest.mark.parametrize("value", [b"\x80\x04 no table", None])
async def test_a_table_that_was_overwritten_or_lost_is_published_again(rig: Rig, value: bytes | None) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        await rig.clock.advance(0.5)
        routing = await rig.bus.kv(subjects.BUCKET_ROUTING)

        await (routing.delete(subjects.ROUTING_KEY) if value is None else routing.put(subjects.ROUTING_KEY, value))
        await rig.clock.advance(15.0)

        assert await rig.shares() == {"decode-0": 1.0}


async def test_an_outage_of_the_broker_costs_no_worker_its_share(rig: Rig) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        await rig.clock.advance(0.5)
        revision = (await rig.table()).revision

        rig.broker.go_down()
        await rig.clock.advance(10.0)
        await rig.broker.come_back()
        await rig.clock.advance(20.0)

        assert (await rig.table()).revision == revision
        assert await rig.shares() == {"decode-0": 1.0}


async def test_items_in_the_lane_of_a_dead_worker_move_to_its_pool(rig: Rig) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        task = await rig.submit("decode-a", lane="w-decode-1")

        await rig.clock.advance(3.0)

        (moved,) = await rig.waiting("decode-a")
        assert (moved.epoch, moved.lane) == (task.epoch + MOVE_STRIDE, "any")
        assert await rig.waiting("decode-a", "w-decode-1") == []


async def test_items_of_a_pool_without_workers_move_to_one_that_serves_the_model(rig: Rig) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        await rig.register("decode-9", pool="decode-b")
        await rig.clock.advance(0.5)
        await rig.deregister("decode-0")
        await rig.submit("decode-a")

        await rig.clock.advance(5.0)

        assert [task.request_id for task in await rig.waiting("decode-b")] == ["i_r1"]


async def test_items_wait_where_no_other_pool_serves_the_model(rig: Rig) -> None:
    async with rig.placement():
        await rig.register("decode-0")
        await rig.clock.advance(0.5)
        await rig.deregister("decode-0")
        task = await rig.submit("decode-a")

        await rig.clock.advance(60.0)

        assert [waiting.epoch for waiting in await rig.waiting("decode-a")] == [task.epoch]


async def test_a_pool_is_not_forgotten_while_something_waits_in_it(rig: Rig) -> None:
    settings = PlacementSettings(forget_s=20.0)
    async with rig.placement(settings=settings):
        await rig.register("decode-0")
        await rig.clock.advance(0.5)
        await rig.deregister("decode-0")
        await rig.submit("decode-a")

        await rig.clock.advance(100.0)
        assert [route.model for route in (await rig.table()).routes] == ["chat"]

        for message in await rig.bus.take(Stage.DECODE, "decode-a", REALTIME, "any", 1):
            await message.ack()
        await rig.clock.advance(30.0)
        assert (await rig.table()).routes == ()


async def give_up(rig: Rig, pool: str) -> None:
    """Deliver an item until the broker has had enough."""
    for _ in range(rig.broker.limits.max_deliver):
        await rig.bus.take(Stage.DECODE, pool, REALTIME, "any", 1)
        rig.broker.redeliver()


async def test_an_item_nobody_finished_is_dead_lettered_and_its_client_told(rig: Rig) -> None:
    heard: list[WorkerMessage] = []

    async def answer(message: BusMessage) -> None:
        heard.append(codec.decode_worker_message(message.payload))
        await rig.bus.respond(message, codec.encode(Confirm(status="accepted")))

    await rig.bus.subscribe(subjects.events_of(IngressId("i")), answer)
    async with rig.placement():
        task = await rig.submit("decode-a")
        await give_up(rig, "decode-a")
        await rig.clock.advance(1.0)

    (failed,) = heard
    assert isinstance(failed, Failed)
    assert (failed.failure.code, failed.failure.status) == ("poison", 500)
    assert task.request_id in failed.failure.message
    assert failed.attempt.fence == (task.epoch + MOVE_STRIDE, 1)
    (letter,) = rig.broker.dead_letters
    assert (letter.stage, letter.num_delivered) == (Stage.DECODE, 5)
    assert codec.decode_task(letter.payload) == task
    assert rig.broker.work.payloads([Stage.DECODE]) == []


async def test_a_dead_letter_does_not_wait_for_an_ingress_that_is_gone(rig: Rig) -> None:
    async with rig.placement():
        await rig.submit("decode-a")
        await give_up(rig, "decode-a")

        await rig.clock.advance(1.0)

    assert len(rig.broker.dead_letters) == 1


async def test_a_registered_ingress_that_does_not_listen_is_told_again(rig: Rig) -> None:
    info = IngressInfo(ingress_id="i", host="h", pid=1, url="http://127.0.0.1:1")
    await (await rig.bus.kv(subjects.BUCKET_REGISTRY)).put("ingress.i", codec.encode(info), ttl_s=1_000.0)
    heard: list[WorkerMessage] = []

    async def answer(message: BusMessage) -> None:
        heard.append(codec.decode_worker_message(message.payload))
        await rig.bus.respond(message, codec.encode(Confirm(status="accepted")))

    async with rig.placement():
        await rig.submit("decode-a")
        await give_up(rig, "decode-a")
        await rig.clock.advance(0.25)
        assert rig.broker.dead_letters == []

        await rig.bus.subscribe(subjects.events_of(IngressId("i")), answer)
        await rig.clock.advance(1.0)

    assert len(heard) == 1
    assert len(rig.broker.dead_letters) == 1


async def test_garbage_on_control_subjects_is_survived(rig: Rig) -> None:
    async with rig.placement():
        await rig.bus.publish("fleet.telemetry.decode.decode-0", b"\xc1garbage")
        await (await rig.bus.kv(subjects.BUCKET_REGISTRY)).put("worker.decode.x", b"\x80\x04.")
        await rig.register("decode-0")

        await rig.clock.advance(0.5)

        assert await rig.shares() == {"decode-0": 1.0}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UnknownPolicyError, match="least_loaded, static"):
        placement_config(PlacementSettings(policy="best"))
