from __future__ import annotations

import asyncio

import pytest

from fleet_common.bus.memory import MemoryBroker, MemoryBus, WorkLimits, matches
from fleet_common.bus.port import BusMessage, DeadDelivery, WorkMessage
from fleet_common.errors import BusError, ContractError, NoResponderError, QueueFullError, RevisionConflictError
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.work import MAX_TASK_BYTES

POOL = "decode-cpu"
SUBJECT = subjects.work(Stage.DECODE, POOL, PriorityClass.REALTIME)


class HandClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def opened(bus: MemoryBus, want: int) -> list[WorkMessage]:
    got: list[WorkMessage] = []
    pull = await bus.pull(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", got.append)
    pull.want(want)
    return got


async def put(bus: MemoryBus, name: str) -> bool:
    return await bus.publish_work(SUBJECT, name.encode(), message_id=name, ttl_s=60)


async def test_message_is_redelivered_when_its_ack_timer_ends() -> None:
    clock = HandClock()
    broker = MemoryBroker(clock)
    got = await opened(broker.connect(), 5)

    await put(broker.connect(), "a")
    await turns()
    clock.now_s += 5.9
    await got[0].in_progress()
    clock.now_s += 5.9
    broker.tick()
    await turns()
    held = len(got)
    clock.now_s += 0.2
    broker.tick()
    await turns()

    assert held == 1
    assert [message.delivery for message in got] == [1, 2]


async def test_item_at_max_deliver_becomes_a_dead_delivery_that_settles_once() -> None:
    broker = MemoryBroker(HandClock(), WorkLimits(max_deliver=2))
    bus = broker.connect()
    await opened(bus, 5)
    await put(bus, "a")
    for _ in range(2):
        await turns()
        broker.redeliver()
    dead: list[DeadDelivery] = []

    async def on_dead(delivery: DeadDelivery) -> None:
        dead.append(delivery)
        await delivery.settle()

    await bus.max_deliveries(on_dead)
    await turns()
    broker.tick()
    await turns()

    assert [(d.payload, d.num_delivered, d.subject) for d in dead] == [(b"a", 2, SUBJECT)]
    assert broker.work.payloads([Stage.DECODE]) == []
    await bus.close()


async def test_stream_at_its_limit_refuses() -> None:
    bus = MemoryBus(MemoryBroker(HandClock(), WorkLimits(max_msgs=1)))
    await put(bus, "a")

    with pytest.raises(QueueFullError):
        await put(bus, "b")


async def test_work_message_above_the_cap_is_refused() -> None:
    bus = MemoryBus()

    with pytest.raises(ContractError):
        await bus.publish_work(SUBJECT, b"x" * (MAX_TASK_BYTES + 1), message_id="a", ttl_s=60)


async def test_expired_item_is_gone() -> None:
    clock = HandClock()
    broker = MemoryBroker(clock)
    bus = broker.connect()
    await put(bus, "a")

    clock.now_s += 61
    broker.tick()
    got = await opened(bus, 1)
    await turns()

    assert got == []


async def test_no_more_is_delivered_than_wanted_and_want_0_takes_back() -> None:
    broker = MemoryBroker(HandClock())
    bus = broker.connect()
    got: list[WorkMessage] = []
    pull = await bus.pull(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", got.append)
    pull.want(2)
    for name in "abc":
        await put(bus, name)
    await turns()
    first = len(got)
    pull.want(1)
    await turns()
    pull.want(4)
    pull.want(0)
    await put(bus, "d")
    await turns()

    assert first == 2
    assert [message.payload for message in got] == [b"a", b"b", b"c"]


async def test_broker_outage_raises_and_reconnect_brings_mirror_up_to_date_before_callbacks() -> None:
    broker = MemoryBroker(HandClock())
    bus = broker.connect()
    kv = await bus.kv("fleet_routing")
    mirror = await kv.mirror()
    seen: list[bytes | None] = []

    async def on_reconnect() -> None:
        seen.append(mirror.get("table"))

    bus.on_reconnect(on_reconnect)
    await kv.put("table", b"1")
    broker.go_down()
    await turns()
    with pytest.raises(BusError):
        await put(bus, "a")
    await broker.come_back()

    assert seen == [b"1"]
    assert bus.is_connected


async def test_kv_compare_and_set_and_expiry() -> None:
    clock = HandClock()
    broker = MemoryBroker(clock)
    kv = await broker.connect().kv("fleet_joins")
    changes: list[tuple[str, bytes | None]] = []
    await kv.mirror(lambda key, value: changes.append((key, value)))

    revision = await kv.create("k", b"1", ttl_s=2)
    with pytest.raises(RevisionConflictError):
        await kv.create("k", b"2")
    await kv.update("k", b"3", revision, ttl_s=2)
    with pytest.raises(RevisionConflictError):
        await kv.update("k", b"4", revision)
    await turns()
    clock.now_s += 3
    broker.tick()
    await turns()

    assert changes == [("k", b"1"), ("k", b"3"), ("k", None)]
    assert await kv.get("k") is None


async def test_request_is_answered_or_fails_at_once_when_nobody_listens() -> None:
    broker = MemoryBroker()
    server, client = broker.connect(), broker.connect()

    async def answer(message: BusMessage) -> None:
        await server.respond(message, message.payload * 2)

    await server.subscribe("fleet.ask.*", answer)

    assert await client.request("fleet.ask.a", b"x", timeout_s=1) == b"xx"
    with pytest.raises(NoResponderError):
        await client.request("fleet.other", b"x", timeout_s=1)
    await server.close()


async def test_callback_that_raises_does_not_end_its_subscription() -> None:
    bus = MemoryBus()
    got: list[bytes] = []

    async def on_message(message: BusMessage) -> None:
        got.append(message.payload)
        raise ValueError("once more")

    subscription = await bus.subscribe("a.>", on_message)
    await bus.publish("a.b", b"1")
    await bus.publish("a.c.d", b"2")
    await turns()
    await subscription.stop()

    assert got == [b"1", b"2"]


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [("a.*", "a.b", True), ("a.*", "a.b.c", False), ("a.>", "a", False), ("a.>", "a.b.c", True), ("a.b", "a.b", True)],
)
def test_subject_patterns(pattern: str, subject: str, expected: bool) -> None:
    assert expected == matches(pattern, subject)
