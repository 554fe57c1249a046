"""Who may do what on a broker configured by `server_config`, and what `fleet bus apply` makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from pydantic import SecretStr

from fleet_common.bus import js
from fleet_common.bus.apply import apply, verify
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.port import BusMessage, DeadDelivery
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, render
from fleet_common.bus.topology import Account
from fleet_common.errors import BusError, BusTimeoutError
from fleet_common.settings import BusSettings
from fleet_common.testing.bus_rig import LANE, LIMITS, POOL, SPEC, eventually, pulling, put
from fleet_common.testing.servers import ServerProcess, nats_server
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec
from fleet_contracts.work import DeadLetter

pytestmark = pytest.mark.integration

PASSWORDS = Passwords({role: f"work-{role}" for role in Role}, {role: f"control-{role}" for role in Role})


@pytest.fixture
def guarded() -> Iterator[ServerProcess]:
    with nats_server(lambda port, store_dir: render(ServerOptions(port, store_dir), PASSWORDS)) as server:
        yield server


class Fleet:
    """Buses by role."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._buses: list[NatsBus] = []

    def settings(self, role: Role) -> BusSettings:
        work, control = SecretStr(PASSWORDS.work[role]), SecretStr(PASSWORDS.control[role])
        return BusSettings(  # type: ignore[call-arg]
            url=self._url, user=role.value, work_password=work, control_password=control, request_timeout_s=0.5
        )

    async def bus(self, role: Role) -> NatsBus:
        bus = await connect_bus(self.settings(role), role.value)
        self._buses.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


@pytest.fixture
async def fleet(guarded: ServerProcess) -> AsyncIterator[Fleet]:
    fleet = Fleet(guarded.url)
    await apply(fleet.settings(Role.ADMIN), SPEC, LIMITS)
    yield fleet
    await fleet.close()


async def test_every_role_can_do_its_work(fleet: Fleet) -> None:
    worker, ingress, placement = [await fleet.bus(r) for r in (Role.WORKER, Role.INGRESS, Role.PLACEMENT)]
    events: list[bytes] = []
    reports: list[bytes] = []

    async def on_event(message: BusMessage) -> None:
        events.append(message.payload)
        await ingress.respond(message, b"confirmed")

    async def on_report(message: BusMessage) -> None:
        reports.append(message.payload)

    await ingress.subscribe(subjects.events_of("i1"), on_event)  # type: ignore[arg-type]
    await worker.subscribe("fleet.tensor.boot.segment", on_report)
    await worker.subscribe(subjects.CANCEL, on_report)
    await placement.subscribe(subjects.TELEMETRY_ALL, on_report)
    await verify(worker, Stage.DECODE, POOL, ["any", LANE], LIMITS)
    inbox = await pulling(worker, 3)
    await put(ingress, "a")
    (message,) = await inbox.first()
    await message.in_progress()
    confirmed = await worker.request("fleet.event.i1.r1.n1", b"finished", timeout_s=2)
    await worker.publish("fleet.telemetry.decode.d0", b"report")
    await ingress.publish(subjects.CANCEL, b"cancel")
    await message.ack()
    await put(worker, "b")
    tombstones = await (await worker.kv(subjects.BUCKET_TOMBSTONES)).mirror()
    await (await ingress.kv(subjects.BUCKET_TOMBSTONES)).put("r1", b"gone", ttl_s=60)
    await (await worker.kv(subjects.BUCKET_JOINS)).create("r1.dec", b"join", ttl_s=60)
    await (await worker.kv(subjects.BUCKET_REGISTRY)).put("worker.decode.d0", b"info")
    await (await ingress.kv(subjects.BUCKET_REGISTRY)).put("ingress.i1", b"info")
    await (await placement.kv(subjects.BUCKET_LEADER)).create("placement", b"me", ttl_s=4)
    await (await placement.kv(subjects.BUCKET_ROUTING)).put("table", b"1")
    mirrors = [await (await bus.kv(subjects.BUCKET_ROUTING)).mirror() for bus in (worker, ingress)]
    registry = await (await placement.kv(subjects.BUCKET_REGISTRY)).mirror()
    await eventually(lambda: len(reports) == 2 and tombstones.get("r1") == b"gone")

    assert (confirmed, events) == (b"confirmed", [b"finished"])
    assert [mirror.get("table") for mirror in mirrors] == [b"1", b"1"]
    assert set(registry.items()) == {"worker.decode.d0", "ingress.i1"}
    assert [bus.stats.num_errors for bus in (worker, ingress, placement)] == [0, 0, 0]


async def test_mover_can_do_its_work(fleet: Fleet) -> None:
    worker, placement = await fleet.bus(Role.WORKER), await fleet.bus(Role.PLACEMENT)
    dead: list[bytes] = []

    async def on_dead(delivery: DeadDelivery) -> None:
        letter = DeadLetter(stage=delivery.stage, reason="poison", payload=delivery.payload, subject=delivery.subject)
        await placement.publish_dead(delivery.stage, letter)
        await delivery.settle()
        dead.append(delivery.payload)

    await placement.max_deliveries(on_dead)
    await pulling(worker, 5)
    await put(worker, "poison")
    await eventually(lambda: dead == [b"poison"])
    await put(worker, "stuck", subject=subjects.work(Stage.DECODE, POOL, PriorityClass.BATCH, LANE))
    waiting = [backlog.lane for backlog in await placement.pool_pending() if backlog.num_pending]
    (moved,) = await placement.take(Stage.DECODE, POOL, PriorityClass.BATCH, LANE, 10)
    await moved.ack()

    assert waiting == [LANE]
    assert placement.stats.num_errors == 0


async def test_worker_cannot_write_the_routing_table_nor_the_leader_nor_another_registry_entry(fleet: Fleet) -> None:
    worker, placement = await fleet.bus(Role.WORKER), await fleet.bus(Role.PLACEMENT)
    routing = await placement.kv(subjects.BUCKET_ROUTING)
    await routing.put("table", b"right")
    control, work = worker.connection(Account.CONTROL), worker.connection(Account.WORK)

    for subject in ("$KV.fleet_routing.table", "$KV.fleet_leader.placement", "$KV.fleet_registry.ingress.i1"):
        with pytest.raises(BusTimeoutError):
            await control.request(subject, b"wrong", 0.2)
        await work.publish(subject, b"wrong")
    entry = await routing.get("table")

    assert entry is not None
    assert entry.value == b"right"


async def test_only_the_ingress_reaches_files_and_jobs(fleet: Fleet) -> None:
    ingress, others = await fleet.bus(Role.INGRESS), [await fleet.bus(r) for r in (Role.WORKER, Role.PLACEMENT)]
    objects = await ingress.objects(subjects.OBJECTS_FILES)
    jobs, lines = await ingress.kv(subjects.BUCKET_JOBS), await ingress.kv(subjects.BUCKET_LINES)

    await objects.put("file-1", b"x" * 300_000)
    await objects.put("file-1", b"content")
    await objects.put("file-2", b"")
    await objects.delete("file-2")
    await jobs.put("job.acme.1", b"record")
    await lines.create("1.1", b"outcome")
    await lines.purge("1")
    mirror = await jobs.mirror()
    await ingress.publish(subjects.result("job_1"), b"over")
    listed = [await lines.entries("1"), await jobs.entries("job.acme")]

    for bus in others:
        with pytest.raises(BusError):
            await bus.objects(subjects.OBJECTS_FILES)
        for bucket in (subjects.BUCKET_JOBS, subjects.BUCKET_LINES):
            with pytest.raises(BusError):
                await bus.kv(bucket)
        work = bus.connection(Account.WORK)
        for subject in ("$KV.fleet_jobs.job.acme.1", "$KV.fleet_lines.1.1", "$O.fleet_files.M.x"):
            with pytest.raises(BusTimeoutError):
                await work.request(subject, b"forged", 0.2)
    assert await objects.get("file-1") == b"content"
    assert [list(entries) for entries in listed] == [[], ["job.acme.1"]]
    assert dict(mirror.items()) == {"job.acme.1": b"record"}
    assert ingress.stats.num_errors == 0


async def test_worker_cannot_delete_or_change_streams_and_consumers(fleet: Fleet) -> None:
    worker = await fleet.bus(Role.WORKER)
    work = worker.connection(Account.WORK)
    stream = subjects.work_stream(Stage.DECODE)

    for call in (f"STREAM.DELETE.{stream}", f"STREAM.PURGE.{stream}", f"STREAM.MSG.DELETE.{stream}"):
        with pytest.raises(BusTimeoutError):
            await js.api(work, call, {"seq": 1}, 0.2)
    with pytest.raises(BusTimeoutError):
        await js.api(
            work, f"CONSUMER.DELETE.{stream}.{subjects.work_consumer(POOL, PriorityClass.REALTIME)}", None, 0.2
        )

    await verify(worker, Stage.DECODE, POOL, ["any"], LIMITS)


async def test_reply_subject_of_a_pull_cannot_write_into_the_control_account(fleet: Fleet) -> None:
    """Within one account the broker delivers a pull to any reply subject, whatever the puller may publish."""
    worker, placement = await fleet.bus(Role.WORKER), await fleet.bus(Role.PLACEMENT)
    routing = await placement.kv(subjects.BUCKET_ROUTING)
    await routing.put("table", b"right")
    work = worker.connection(Account.WORK)
    consumer = subjects.work_consumer(POOL, PriorityClass.REALTIME)

    body = msgspec.json.encode({"batch": 1, "no_wait": True})
    await put(worker, "forged table")
    reply = "$KV.fleet_routing.table"
    await work.publish(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.work_stream(Stage.DECODE)}.{consumer}", body, reply=reply)
    await asyncio.sleep(0.2)
    entry = await routing.get("table")

    assert entry is not None
    assert entry.value == b"right"


async def test_worker_cannot_listen_to_other_inboxes_or_events(fleet: Fleet) -> None:
    worker, ingress = await fleet.bus(Role.WORKER), await fleet.bus(Role.INGRESS)
    heard: list[bytes] = []

    async def on_message(message: BusMessage) -> None:
        heard.append(message.payload)

    for subject in ("_INBOX_ingress.>", "fleet.event.>", ">"):
        await worker.subscribe(subject, on_message)
    await worker.publish("fleet.event.i1.r1.n1", b"own event")
    await ingress.kv(subjects.BUCKET_TOMBSTONES)

    assert heard == []


async def test_nobody_enters_without_a_password(fleet: Fleet, guarded: ServerProcess) -> None:
    anonymous = BusSettings(url=guarded.url, connect_timeout_s=0.6)  # type: ignore[call-arg]
    wrong = fleet.settings(Role.WORKER).model_copy(
        update={"control_password": SecretStr("guess"), "connect_timeout_s": 0.6}
    )

    for settings in (anonymous, wrong):
        with pytest.raises(BusError, match="cannot reach the broker"):
            await connect_bus(settings, "intruder")


async def test_apply_reports_changes_once_and_verify_wants_them(settings: BusSettings) -> None:
    bus = await connect_bus(settings, "test")
    with pytest.raises(BusError, match="stream FLEET_WORK_DECODE is missing: run `fleet bus apply`"):
        await verify(bus, Stage.DECODE, POOL, ["any"])
    with pytest.raises(BusError, match="run `fleet bus apply`"):
        await bus.kv(subjects.BUCKET_ROUTING)

    first = await apply(settings, SPEC)
    second = await apply(settings, SPEC)
    await verify(bus, Stage.DECODE, POOL, ["any", LANE])
    with pytest.raises(BusError, match="w-d9 is missing"):
        await verify(bus, Stage.DECODE, POOL, ["w-d9"])
    third = await apply(settings, SPEC, LIMITS)
    with pytest.raises(BusError, match=r"configured differently \(ack_wait"):
        await verify(bus, Stage.DECODE, POOL, ["any"])
    await bus.close()

    assert "created stream FLEET_WORK_DECODE" in first
    assert "created consumer decode-cpu__realtime__w-d0" in first
    assert second == []
    assert any(line.startswith("updated stream FLEET_WORK_DECODE (max_msgs") for line in third)


async def test_pool_is_retired_only_when_empty(settings: BusSettings) -> None:
    await apply(settings, SPEC)
    bus = await connect_bus(settings, "test")
    await put(bus, "a")
    other = FleetSpec(
        pools=(PoolSpec(stage=Stage.DECODE, pool="decode-gpu", model="m", workers=(WorkerId("g0"),)),),
    )

    kept = await apply(settings, other)
    (message,) = await bus.take(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", 1)
    await message.ack()
    retired = await apply(settings, other)
    await bus.close()

    assert "kept consumer decode-cpu__realtime__any: 1 messages are left" in kept
    assert "retired consumer decode-cpu__batch__w-d0" in kept
    assert retired == ["retired consumer decode-cpu__realtime__any"]
