"""The NATS bus while the broker dies, freezes, loses its connections or its consumers."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from fleet_common.bus import js
from fleet_common.bus.kv import NatsMirror
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.port import BusMessage
from fleet_common.bus.topology import Account, bucket
from fleet_common.errors import BusError
from fleet_common.settings import BusSettings
from fleet_common.testing.bus_rig import POOL, eventually, pulling, put
from fleet_common.testing.proxy import Proxy
from fleet_common.testing.servers import ServerProcess, free_port
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass

pytestmark = pytest.mark.integration


async def kill_and_restart(server: ServerProcess, down_s: float = 0.5) -> None:
    server.kill()
    await asyncio.sleep(down_s)
    await asyncio.to_thread(server.restart)


async def put_until_done(bus: NatsBus, name: str) -> None:
    """Publish as a worker does: again until the broker has it."""
    async with asyncio.timeout(10):
        while True:
            try:
                await put(bus, name)
            except BusError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_work_survives_kill_9_of_the_broker(server: ServerProcess, bus: NatsBus, other: NatsBus) -> None:
    names = [f"m{number}" for number in range(200)]
    done: set[str] = set()
    inbox = await pulling(bus, 1000)

    async def publish() -> None:
        for name in names:
            await put_until_done(other, name)
            await asyncio.sleep(0.003)

    async def settle() -> None:
        while len(done) < len(names):
            while inbox.messages:
                message = inbox.messages.pop()
                with contextlib.suppress(BusError):
                    await message.ack()
                    done.add(message.payload.decode())
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(publish())
        group.create_task(settle())
        await asyncio.sleep(0.3)
        await kill_and_restart(server)

    assert done == set(names)
    assert all(b.num_pending + b.num_ack_pending == 0 for b in await bus.pool_pending())
    assert (bus.stats.num_reconnects, bus.is_connected) == (2, True)


async def test_pull_resumes_at_once_after_a_restart_without_over_delivery(
    server: ServerProcess, bus: NatsBus, other: NatsBus
) -> None:
    inbox = await pulling(bus, 3)
    await asyncio.sleep(0.1)
    await kill_and_restart(server)
    await eventually(lambda: bus.is_connected and other.is_connected)

    started_s = time.monotonic()
    for number in range(6):
        await put_until_done(other, f"m{number}")
    await inbox.first(3)
    took_s = time.monotonic() - started_s
    await asyncio.sleep(0.3)

    assert took_s < 2
    assert len({m.payload for m in inbox.messages}) == 3


async def test_subscriptions_requests_and_mirrors_resume(server: ServerProcess, bus: NatsBus, other: NatsBus) -> None:
    got: list[bytes] = []
    changes: list[tuple[str, bytes | None]] = []
    order: list[str] = []

    async def on_message(message: BusMessage) -> None:
        got.append(message.payload)
        await bus.respond(message, b"ok")

    await bus.subscribe("fleet.event.i1.>", on_message)
    kv = await other.kv(subjects.BUCKET_ROUTING)
    mirror = await (await bus.kv(subjects.BUCKET_ROUTING)).mirror(lambda key, value: changes.append((key, value)))

    async def on_reconnect() -> None:
        order.append(f"synced {mirror.synced_monotonic_s > killed_s}")

    bus.on_reconnect(on_reconnect)
    await kv.put("table", b"1")
    await eventually(lambda: mirror.get("table") == b"1")
    killed_s = time.monotonic()
    await kill_and_restart(server)
    await eventually(lambda: bus.is_connected and other.is_connected and bool(order))
    answer = await other.request("fleet.event.i1.r.n", b"x", timeout_s=2)
    await kv.put("table", b"2")
    await eventually(lambda: mirror.get("table") == b"2", 2)

    assert (answer, got) == (b"ok", [b"x"])
    assert changes == [("table", b"1"), ("table", b"2")]
    assert set(order) == {"synced True"}


async def test_mirror_catches_up_on_what_happened_while_it_was_cut_off(
    server: ServerProcess, bus: NatsBus, applied: BusSettings
) -> None:
    kv = await bus.kv(subjects.BUCKET_REGISTRY)
    await kv.put("worker.stays", b"1", ttl_s=60)
    await kv.put("worker.changes", b"1", ttl_s=60)
    await kv.put("worker.expires", b"1", ttl_s=1)
    await kv.put("worker.deleted", b"1", ttl_s=60)
    async with Proxy(server.port).serving() as proxy:
        far = await connect_bus(applied.model_copy(update={"url": f"nats://127.0.0.1:{proxy.port}"}), "far")
        mirror = await (await far.kv(subjects.BUCKET_REGISTRY)).mirror()
        changes: list[tuple[str, bytes | None]] = []
        await (await far.kv(subjects.BUCKET_REGISTRY)).mirror(lambda key, value: changes.append((key, value)))
        changes.clear()

        proxy.cut()
        await kv.put("worker.changes", b"2", ttl_s=60)
        await kv.put("worker.new", b"1", ttl_s=60)
        await kv.delete("worker.deleted")
        await asyncio.sleep(1.3)
        stale = dict(mirror.items())
        proxy.mend()
        # Two mirrors, each reads again by itself.
        await eventually(lambda: mirror.get("worker.changes") == b"2" and len(changes) >= 4, 5)
        await far.close()

    assert stale["worker.changes"] == b"1"
    assert dict(mirror.items()) == {"worker.stays": b"1", "worker.changes": b"2", "worker.new": b"1"}
    assert sorted(changes) == sorted(
        [("worker.changes", b"2"), ("worker.new", b"1"), ("worker.deleted", None), ("worker.expires", None)]
    )


async def test_mirror_follows_a_bucket_that_lost_its_data(bus: NatsBus) -> None:
    kv = await bus.kv(subjects.BUCKET_ROUTING)
    control = bus.connection(Account.CONTROL)
    mirror = NatsMirror(control, bucket(subjects.BUCKET_ROUTING), None, 2.0)
    await mirror.start()
    for number in range(5):
        await kv.put("table", str(number).encode())
    await eventually(lambda: mirror.get("table") == b"4")
    config = (await js.api(control, "STREAM.INFO.KV_fleet_routing", None, 2))["config"]

    await js.api(control, "STREAM.DELETE.KV_fleet_routing", None, 2)
    await js.api(control, "STREAM.CREATE.KV_fleet_routing", config, 2)
    await kv.put("table", b"new")
    await mirror.read_again()
    after = mirror.get("table")
    await mirror.stop()

    assert after == b"new"


async def test_publish_right_after_a_reconnect_works_and_is_stored_once(
    server: ServerProcess, bus: NatsBus, other: NatsBus
) -> None:
    await put(bus, "before")

    server.kill()
    publishing = [asyncio.ensure_future(put(bus, f"m{number}")) for number in range(5)]
    await asyncio.sleep(0.2)
    await asyncio.to_thread(server.restart)
    answers = await asyncio.gather(*publishing)
    inbox = await pulling(other, 10)
    await inbox.first(6)
    await asyncio.sleep(0.1)

    assert answers == [True] * 5
    assert sorted(inbox.payloads) == sorted([b"before", *(f"m{number}".encode() for number in range(5))])


async def test_calls_raise_bus_error_in_time_while_the_broker_is_away(server: ServerProcess, bus: NatsBus) -> None:
    kv = await bus.kv(subjects.BUCKET_JOINS)
    inbox = await pulling(bus, 1)
    await put(bus, "a")
    (message,) = await inbox.first()
    server.kill()
    await eventually(lambda: not bus.is_connected)

    started_s = time.monotonic()
    calls = (put(bus, "b"), kv.get("k"), kv.put("k", b"1"), message.ack(), bus.request("fleet.x", b"", timeout_s=1))
    results = await asyncio.gather(*calls, return_exceptions=True)
    await message.in_progress()
    took_s = time.monotonic() - started_s

    assert [type(result) is not int and isinstance(result, BusError) for result in results] == [True] * 5
    assert took_s < 3


async def test_close_is_quick_while_the_broker_is_away(server: ServerProcess, applied: BusSettings) -> None:
    bus = await connect_bus(applied, "test")
    await pulling(bus, 5)
    await (await bus.kv(subjects.BUCKET_JOINS)).mirror()
    server.kill()
    await eventually(lambda: not bus.is_connected)

    started_s = time.monotonic()
    await bus.close()

    assert time.monotonic() - started_s < 5.5


async def test_frozen_broker_is_a_pause(server: ServerProcess, bus: NatsBus, other: NatsBus) -> None:
    inbox = await pulling(bus, 10)
    await put(other, "a")
    await inbox.first()

    server.pause()
    with pytest.raises(BusError):
        await put(other, "b")
    server.resume()
    await put(other, "c")
    await inbox.first(3)

    assert {b"a", b"b", b"c"} == set(inbox.payloads)


async def test_pull_recovers_when_its_consumer_is_made_again(bus: NatsBus, applied: BusSettings) -> None:
    inbox = await pulling(bus, 5)
    work = bus.connection(Account.WORK)
    consumer = subjects.work_consumer(POOL, PriorityClass.REALTIME)
    info = await js.api(work, f"CONSUMER.INFO.FLEET_WORK_DECODE.{consumer}", None, 2)

    await js.api(work, f"CONSUMER.DELETE.FLEET_WORK_DECODE.{consumer}", None, 2)
    await asyncio.sleep(0.8)
    body = {"stream_name": "FLEET_WORK_DECODE", "config": info["config"]}
    await js.api(work, f"CONSUMER.DURABLE.CREATE.FLEET_WORK_DECODE.{consumer}", body, 2)
    await put(bus, "a")
    await inbox.first(timeout_s=5)

    assert inbox.payloads == [b"a"]


async def test_connection_that_the_client_library_gives_up_is_made_again(bus: NatsBus, other: NatsBus) -> None:
    """The broker ends a connection with an error on an overlong subject, and nats-py then stays closed for good."""
    inbox = await pulling(bus, 5)
    got: list[bytes] = []

    async def on_message(message: BusMessage) -> None:
        got.append(message.payload)

    await bus.subscribe("fleet.cancel", on_message)
    mirror = await (await bus.kv(subjects.BUCKET_TOMBSTONES)).mirror()
    await bus.publish("x" * 8192, b"")
    await eventually(lambda: bus.stats.num_reconnects == 1)
    await put(other, "a")
    await inbox.first()
    await other.publish("fleet.cancel", b"c")
    await (await other.kv(subjects.BUCKET_TOMBSTONES)).put("r1", b"1")
    await eventually(lambda: got == [b"c"] and mirror.get("r1") == b"1")

    assert inbox.payloads == [b"a"]


async def test_connecting_to_nobody_fails_in_time(settings: BusSettings) -> None:
    nowhere = settings.model_copy(update={"url": f"nats://127.0.0.1:{free_port()}", "connect_timeout_s": 0.6})

    started_s = time.monotonic()
    with pytest.raises(BusError, match="cannot reach the broker"):
        await connect_bus(nowhere, "test")

    assert time.monotonic() - started_s < 3
