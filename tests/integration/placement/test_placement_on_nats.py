"""Placement and its mover against the real broker, with its real accounts and permissions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from fleet_common.bus.apply import apply
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.port import BusMessage
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, render
from fleet_common.bus.topology import TopologyLimits
from fleet_common.clock import SystemClock
from fleet_common.settings import BusSettings
from fleet_common.telemetry.names import PlacementMetrics
from fleet_common.testing.servers import ServerProcess, nats_server
from fleet_contracts import codec, subjects
from fleet_contracts.base import IngressId, PriorityClass, RequestId, Stage, StepId, WorkerId
from fleet_contracts.control import FleetSpec, ModelCard, PoolSpec, RoutingTable, WorkerInfo
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import Confirm, Failed, WorkerMessage
from fleet_contracts.work import MOVE_STRIDE, EventAddress, Plan, PlanStep, StepTask
from fleet_placement.app import build_service
from fleet_placement.service import PlacementService
from fleet_placement.settings import PlacementSettings

pytestmark = pytest.mark.integration

PASSWORDS = Passwords(work=dict.fromkeys(Role, "work-secret"), control=dict.fromkeys(Role, "control-secret"))
WORKERS = (WorkerId("decode-0"), WorkerId("decode-1"))
SPEC = FleetSpec(
    pools=(
        PoolSpec(stage=Stage.DECODE, pool="decode-a", model="chat", workers=WORKERS),
        PoolSpec(stage=Stage.DECODE, pool="decode-b", model="chat", workers=(WorkerId("decode-9"),)),
    )
)
#: Short, so that deaths take no time.
LIMITS = TopologyLimits(ack_wait_s=0.5, max_deliver=2)
REALTIME = PriorityClass.REALTIME


@dataclass
class Stand:
    """A broker set up for a fleet, and connections in the roles that tests speak in."""

    server: ServerProcess
    worker: NatsBus
    ingress: NatsBus
    admin: NatsBus

    def settings(self, role: str) -> BusSettings:
        return BusSettings(
            url=self.server.url, user=role, work_password="work-secret", control_password="control-secret"
        )

    @asynccontextmanager
    async def placement(self, name: str) -> AsyncIterator[PlacementService]:
        bus = await connect_bus(self.settings("placement"), name)
        settings = PlacementSettings(instance_id=name, sweep_s=0.5, leader_lease_s=2, grace_s=6.0)
        service = await build_service(settings, bus, PlacementMetrics(), SystemClock())
        running = asyncio.get_running_loop().create_task(service.run())
        try:
            yield service
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await bus.close()

    async def register(self, name: str, pool: str = "decode-a", ttl_s: float = 60.0) -> None:
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
        )
        registry = await self.worker.kv(subjects.BUCKET_REGISTRY)
        await registry.put(f"worker.decode.{name}", codec.encode(info), ttl_s=ttl_s)

    async def table(self) -> RoutingTable | None:
        entry = await (await self.ingress.kv(subjects.BUCKET_ROUTING)).get(subjects.ROUTING_KEY)
        return codec.decode_table(entry.value) if entry else None

    async def shares(self) -> dict[str, float]:
        table = await self.table()
        routes = table.routes if table else ()
        return {s.worker_id: s.share_ratio for route in routes for pool in route.pools for s in pool.workers}

    async def submit(self, pool: str, lane: str = "any") -> StepTask:
        now_unix_s = time.time()
        task = StepTask(
            request_id=RequestId("i_r1"),
            step_id=StepId("dec"),
            epoch=0,
            plan=Plan(
                steps=(PlanStep(step_id=StepId("dec"), stage=Stage.DECODE, model="chat", params=DecodeParams()),)
            ),
            model="chat",
            priority_class=REALTIME,
            tenant="t",
            deadline_unix_s=now_unix_s + 60.0,
            enqueued_unix_s=now_unix_s,
            events=EventAddress(ingress_id=IngressId("i"), nonce="n"),
            lane=lane,
        )
        message_id = subjects.message_id(task.request_id, task.step_id, task.epoch)
        subject = subjects.work(Stage.DECODE, pool, REALTIME, lane)
        await self.ingress.publish_work(subject, codec.encode(task), message_id=message_id, ttl_s=90.0)
        return task

    async def take(self, pool: str, lane: str = "any") -> list[StepTask]:
        """Deliver what waits, without settling it."""
        messages = await self.admin.take(Stage.DECODE, pool, REALTIME, lane, 10)
        return [codec.decode_task(message.payload) for message in messages]

    async def num_stored(self) -> int:
        return sum(b.num_pending + b.num_ack_pending for b in await self.admin.pool_pending())


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with nats_server(lambda port, folder: render(ServerOptions(port=port, store_dir=folder), PASSWORDS)) as server:
        yield server


@pytest.fixture
async def stand(server: ServerProcess) -> AsyncIterator[Stand]:
    def settings(role: str) -> BusSettings:
        return BusSettings(url=server.url, user=role, work_password="work-secret", control_password="control-secret")

    await apply(settings("admin"), SPEC, LIMITS)
    buses = [await connect_bus(settings(role), role) for role in ("worker", "ingress", "admin")]
    yield Stand(server, *buses)
    for bus in buses:
        await bus.close()


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> float:
    """Wait for a condition; returns the seconds it took."""
    started_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  # what is waited for happens in the broker
            await asyncio.sleep(0.05)
    return time.monotonic() - started_s


async def test_tables_follow_the_registry_and_expired_leases(stand: Stand) -> None:
    async with stand.placement("placement-a"):
        await stand.register("decode-0")
        await stand.register("decode-1", ttl_s=2.0)

        async def both() -> bool:
            return await stand.shares() == {"decode-0": 0.5, "decode-1": 0.5}

        async def one() -> bool:
            return await stand.shares() == {"decode-0": 1.0}

        await until(both)
        await until(one)

    table = await stand.table()
    assert table is not None
    assert "decode-1 is gone, share 0.50 -> 0.00" in table.reasons


async def test_a_stand_by_takes_over_when_the_leader_is_killed(stand: Stand) -> None:
    first_bus = await connect_bus(stand.settings("placement"), "placement-a")
    settings = PlacementSettings(instance_id="placement-a", leader_lease_s=2)
    first = await build_service(settings, first_bus, PlacementMetrics(), SystemClock())
    running = asyncio.get_running_loop().create_task(first.run())
    await stand.register("decode-0")

    async def is_led() -> bool:
        return first.is_leading and await stand.shares() != {}

    await until(is_led)
    async with stand.placement("placement-b") as second:
        # As good as kill -9: the connection goes before anything can be given back.
        await first_bus.close()
        running.cancel()
        await asyncio.wait([running])

        async def took_over() -> bool:
            return second.is_leading

        took_s = await until(took_over)
        await stand.register("decode-1")

        async def continued() -> bool:
            table = await stand.table()
            return table is not None and table.revision == 2

        await until(continued)

    assert took_s < 6.0


async def test_a_restarted_broker_costs_no_worker_its_share(stand: Stand) -> None:
    async with stand.placement("placement-a") as service:
        await stand.register("decode-0")

        async def is_led() -> bool:
            return service.is_leading and await stand.shares() == {"decode-0": 1.0}

        await until(is_led)
        before = await stand.table()
        await asyncio.to_thread(stand.server.kill)
        await asyncio.sleep(3.0)
        await asyncio.to_thread(stand.server.start)
        await until(is_led)
        await stand.register("decode-1")

        async def joined() -> bool:
            return "decode-1" in await stand.shares()

        await until(joined)

        after = await stand.table()
        assert before is not None and after is not None
        assert after.revision == before.revision + 1
        assert await stand.shares() == {"decode-0": 0.5, "decode-1": 0.5}


async def test_an_item_at_max_deliver_becomes_a_dead_letter_and_its_client_hears(stand: Stand) -> None:
    heard: list[WorkerMessage] = []

    async def answer(message: BusMessage) -> None:
        heard.append(codec.decode_worker_message(message.payload))
        await stand.ingress.respond(message, codec.encode(Confirm(status="accepted")))

    await stand.ingress.subscribe(subjects.events_of(IngressId("i")), answer)
    letters: list[bytes] = []

    async def keep(message: BusMessage) -> None:
        letters.append(message.payload)

    await stand.admin.subscribe(subjects.DEAD_ALL, keep)
    task = await stand.submit("decode-a")
    for _ in range(LIMITS.max_deliver):
        assert await stand.take("decode-a") != []
        await asyncio.sleep(LIMITS.ack_wait_s + 0.2)
    assert await stand.take("decode-a") == []

    # It died while nobody listened: a leader that comes later hears of it all the same.
    async with stand.placement("placement-a"):

        async def is_told() -> bool:
            return bool(heard) and bool(letters)

        await until(is_told)

    (failed,) = heard
    assert isinstance(failed, Failed)
    assert (failed.failure.code, failed.failure.status) == ("poison", 500)
    assert failed.attempt.fence == (task.epoch + MOVE_STRIDE, 1)
    letter = codec.decode_dead_letter(letters[0])
    assert codec.decode_task(letter.payload) == task
    assert letter.num_delivered == LIMITS.max_deliver
    assert await stand.num_stored() == 0


async def test_the_lane_of_a_dead_worker_is_emptied_into_its_pool(stand: Stand) -> None:
    await stand.register("decode-0")
    async with stand.placement("placement-a"):
        await stand.submit("decode-a", lane="w-decode-1")
        # Delivered to the worker that died of it: it moves once its ack timer has ended.
        assert len(await stand.take("decode-a", "w-decode-1")) == 1

        found: list[StepTask] = []

        async def has_moved() -> bool:
            found.extend(await stand.take("decode-a"))
            return bool(found)

        await until(has_moved)

    assert (found[0].epoch, found[0].lane) == (MOVE_STRIDE, "any")


async def test_a_pool_without_workers_is_emptied_into_another_of_its_model(stand: Stand) -> None:
    await stand.register("decode-0", ttl_s=2.0)
    await stand.register("decode-9", pool="decode-b")
    async with stand.placement("placement-a"):
        await stand.submit("decode-a")

        found: list[StepTask] = []

        async def has_moved() -> bool:
            found.extend(await stand.take("decode-b"))
            return bool(found)

        await until(has_moved)

    assert found[0].request_id == "i_r1"
