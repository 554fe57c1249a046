"""What every bus does, in memory and on NATS."""

from __future__ import annotations

import asyncio

import pytest

from fleet_common.bus.port import BusMessage, DeadDelivery
from fleet_common.errors import (
    BusTimeoutError,
    ContractError,
    NoResponderError,
    QueueFullError,
    RevisionConflictError,
)
from fleet_common.testing.bus_rig import LANE, LIMITS, POOL, SUBJECT, Rig, eventually, pulling, put
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.work import MAX_TASK_BYTES, DeadLetter

pytestmark = pytest.mark.integration


async def test_unsettled_message_is_delivered_again_after_ack_wait(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)

    await put(bus, "a")
    await inbox.first(2)

    assert [(m.payload, m.delivery, m.subject) for m in inbox.messages] == [(b"a", 1, SUBJECT), (b"a", 2, SUBJECT)]


async def test_in_progress_holds_the_ack_timer(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)
    await put(bus, "a")
    (message,) = await inbox.first()

    for _ in range(7):
        await asyncio.sleep(0.15)
        await message.in_progress()

    assert len(inbox.messages) == 1
    await message.ack()


async def test_acked_message_does_not_come_again_and_may_be_acked_twice(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)
    await put(bus, "a")
    (message,) = await inbox.first()

    await message.ack()
    await message.ack()
    await asyncio.sleep(1.4 * LIMITS.ack_wait_s)

    assert len(inbox.messages) == 1
    assert all(b.num_pending + b.num_ack_pending == 0 for b in await bus.pool_pending())


async def test_stale_ack_settles_the_message(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)
    await put(bus, "a")
    first, second = await inbox.first(2)

    await first.ack()
    await asyncio.sleep(1.4 * LIMITS.ack_wait_s)

    assert second.delivery == 2
    assert len(inbox.messages) == 2


async def test_nak_brings_the_message_back_after_its_delay(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)
    await put(bus, "a")
    (message,) = await inbox.first()

    await message.nak(0.2)
    await asyncio.sleep(0.1)
    early = len(inbox.messages)
    await inbox.first(2, LIMITS.ack_wait_s)

    assert (early, inbox.messages[1].delivery) == (1, 2)


async def test_terminated_message_is_gone(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)
    await put(bus, "a")
    (message,) = await inbox.first()

    await message.term("no message of ours")
    await asyncio.sleep(1.4 * LIMITS.ack_wait_s)

    assert len(inbox.messages) == 1


async def test_second_publish_with_the_same_id_is_swallowed(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 5)

    answers = [await put(bus, "a"), await put(bus, "a"), await put(bus, "b")]
    await inbox.first(2)

    assert answers == [True, False, True]
    assert inbox.payloads == [b"a", b"b"]


async def test_full_stream_refuses_and_takes_again_when_there_is_room(rig: Rig) -> None:
    bus = await rig.bus()
    for number in range(LIMITS.max_msgs):
        await put(bus, f"m{number}")

    with pytest.raises(QueueFullError):
        await put(bus, "one too many")
    (message,) = await bus.take(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", 1)
    await message.ack()

    assert await put(bus, "one too many")


async def test_message_above_the_cap_is_refused_by_its_publisher(rig: Rig) -> None:
    bus = await rig.bus()

    with pytest.raises(ContractError):
        await bus.publish_work(SUBJECT, b"x" * (MAX_TASK_BYTES + 1), message_id="a", ttl_s=60)


async def test_never_more_is_delivered_than_wanted(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 3)

    for number in range(8):
        await put(bus, f"m{number}")
    await inbox.first(3)
    for message in list(inbox.messages):
        await message.ack()
    await asyncio.sleep(0.2)
    held = len(inbox.messages)
    inbox.pull.want(2)
    await inbox.first(5)
    await asyncio.sleep(0.1)

    assert (held, len(inbox.messages)) == (3, 5)


async def test_want_0_withdraws_and_a_later_want_gets_what_waited(rig: Rig) -> None:
    bus = await rig.bus()
    inbox = await pulling(bus, 4)
    await asyncio.sleep(0.1)

    inbox.pull.want(0)
    await asyncio.sleep(0.2)
    await put(bus, "a")
    await asyncio.sleep(0.2)
    withdrawn = list(inbox.messages)
    inbox.pull.want(1)
    await inbox.first()

    assert withdrawn == []
    assert inbox.payloads == [b"a"]


async def test_two_pulls_of_one_consumer_share_its_messages(rig: Rig) -> None:
    bus, other = await rig.bus(), await rig.bus()
    inboxes = [await pulling(bus, 4), await pulling(other, 4)]
    await asyncio.sleep(0.1)

    for number in range(8):
        await put(bus, f"m{number}")
    await eventually(lambda: sum(len(inbox.messages) for inbox in inboxes) == 8)

    assert [len(inbox.messages) for inbox in inboxes] == [4, 4]


async def test_lane_of_a_worker_is_its_own(rig: Rig) -> None:
    bus = await rig.bus()
    anybody, own = await pulling(bus, 5), await pulling(bus, 5, LANE)

    await put(bus, "a", subject=subjects.work(Stage.DECODE, POOL, PriorityClass.REALTIME, LANE))
    await own.first()
    await own.messages[0].ack()

    assert anybody.messages == []


async def test_message_past_its_ttl_is_gone(rig: Rig) -> None:
    bus = await rig.bus()

    await put(bus, "short", ttl_s=1)
    await put(bus, "long", ttl_s=60)
    await asyncio.sleep(1.5)
    inbox = await pulling(bus, 5)
    await inbox.first()

    assert inbox.payloads == [b"long"]


async def test_stopped_pull_gives_back_what_it_did_not_take(rig: Rig) -> None:
    bus = await rig.bus()
    stopped = await pulling(bus, 5)
    await asyncio.sleep(0.1)

    await stopped.pull.stop()
    await put(bus, "a")
    inbox = await pulling(bus, 5)
    await inbox.first()

    assert stopped.messages == []


async def _let_die(rig: Rig) -> None:
    """An item reaches `max_deliver` while nobody listens for it."""
    bus = await rig.bus()
    inbox = await pulling(bus, 5)
    await put(bus, "a")
    await inbox.first(LIMITS.max_deliver)
    await asyncio.sleep(2 * LIMITS.ack_wait_s)


async def test_item_that_died_while_nobody_listened_is_told_and_settles(rig: Rig) -> None:
    await _let_die(rig)
    mover = await rig.bus()
    dead: list[DeadDelivery] = []

    async def on_dead(delivery: DeadDelivery) -> None:
        dead.append(delivery)
        letter = DeadLetter(stage=delivery.stage, reason="poison", payload=delivery.payload, subject=delivery.subject)
        await mover.publish_dead(delivery.stage, letter)
        await delivery.settle()

    await mover.max_deliveries(on_dead)
    await eventually(lambda: len(dead) == 1)
    await asyncio.sleep(0.1)

    assert [(d.stage, d.payload, d.subject, d.num_delivered) for d in dead] == [(Stage.DECODE, b"a", SUBJECT, 2)]
    for number in range(LIMITS.max_msgs):
        assert await put(mover, f"room {number}")


async def test_dead_item_whose_callback_fails_comes_again(rig: Rig) -> None:
    await _let_die(rig)
    mover = await rig.bus()
    seen: list[bytes] = []

    async def on_dead(delivery: DeadDelivery) -> None:
        seen.append(delivery.payload)
        if len(seen) == 1:
            raise ValueError("the store was away")
        await delivery.settle()

    await mover.max_deliveries(on_dead)
    await eventually(lambda: len(seen) == 2)
    await asyncio.sleep(0.2)

    assert seen == [b"a", b"a"]


async def test_backlog_counts_and_a_lane_without_worker_can_be_drained(rig: Rig) -> None:
    bus = await rig.bus()
    for name in "abc":
        await put(bus, name)

    taken = await bus.take(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", 2)
    (backlog,) = [b for b in await bus.pool_pending() if b.num_pending]
    for message in taken:
        await message.ack()
    rest = await bus.take(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", 10)

    assert [m.payload for m in taken] == [b"a", b"b"]
    assert (backlog.pool, backlog.lane, backlog.num_pending, backlog.num_ack_pending) == (POOL, "any", 1, 2)
    assert [m.payload for m in rest] == [b"c"]
    assert await bus.take(Stage.DECODE, POOL, PriorityClass.REALTIME, "w-nobody", 10) == []


async def test_core_messages_arrive_in_order(rig: Rig) -> None:
    bus, other = await rig.bus(), await rig.bus()
    got: list[bytes] = []

    async def on_message(message: BusMessage) -> None:
        await asyncio.sleep(0)
        got.append(message.payload)

    subscription = await bus.subscribe("fleet.event.i1.>", on_message)
    for number in range(200):
        await other.publish("fleet.event.i1.r1.n1", str(number).encode())
    await eventually(lambda: len(got) == 200)
    await subscription.stop()
    await other.publish("fleet.event.i1.r1.n1", b"late")
    await asyncio.sleep(0.05)

    assert got == [str(number).encode() for number in range(200)]


async def test_request_is_answered_or_times_out_or_fails_at_once(rig: Rig) -> None:
    bus, other = await rig.bus(), await rig.bus()

    async def answer(message: BusMessage) -> None:
        if message.payload != b"silence":
            await bus.respond(message, b"<" + message.payload + b">")

    await bus.subscribe("fleet.ask.i1", answer)

    assert await other.request("fleet.ask.i1", b"x", timeout_s=2) == b"<x>"
    with pytest.raises(BusTimeoutError):
        await other.request("fleet.ask.i1", b"silence", timeout_s=0.1)
    with pytest.raises(NoResponderError):
        await other.request("fleet.ask.nobody", b"x", timeout_s=30)


async def test_callback_that_raises_does_not_end_the_subscription(rig: Rig) -> None:
    bus = await rig.bus()
    got: list[bytes] = []

    async def on_message(message: BusMessage) -> None:
        got.append(message.payload)
        raise ValueError("once more")

    await bus.subscribe("fleet.cancel", on_message)
    await bus.publish("fleet.cancel", b"1")
    await bus.publish("fleet.cancel", b"2")
    await eventually(lambda: len(got) == 2)

    assert got == [b"1", b"2"]


async def test_compare_and_set(rig: Rig) -> None:
    kv = await (await rig.bus()).kv(subjects.BUCKET_JOINS)

    absent = await kv.get("r.dec")
    revision = await kv.create("r.dec", b"1", ttl_s=60)
    with pytest.raises(RevisionConflictError):
        await kv.create("r.dec", b"2")
    newer = await kv.update("r.dec", b"3", revision)
    with pytest.raises(RevisionConflictError):
        await kv.update("r.dec", b"4", revision)
    entry = await kv.get("r.dec")

    assert absent is None
    assert newer > revision
    assert entry is not None
    assert (entry.value, entry.revision) == (b"3", newer)


async def test_key_that_is_no_key_is_refused(rig: Rig) -> None:
    kv = await (await rig.bus()).kv(subjects.BUCKET_JOINS)

    for key in ("", "a b", "a.>", "*", ".a", "a..b"):
        with pytest.raises(ValueError, match="no key"):
            await kv.put(key, b"1")


async def test_deleted_key_is_absent_and_can_be_created(rig: Rig) -> None:
    kv = await (await rig.bus()).kv(subjects.BUCKET_JOINS)
    await kv.put("k", b"1")

    await kv.delete("k")
    await kv.delete("never.there")
    gone = await kv.get("k")
    await kv.create("k", b"2")
    entry = await kv.get("k")

    assert gone is None
    assert entry is not None
    assert entry.value == b"2"


async def test_mirror_starts_whole_and_follows_changes_and_expiry(rig: Rig) -> None:
    bus, other = await rig.bus(), await rig.bus()
    kv = await bus.kv(subjects.BUCKET_REGISTRY)
    changes: list[tuple[str, bytes | None]] = []
    await kv.put("worker.old", b"0", ttl_s=60)

    mirror = await (await other.kv(subjects.BUCKET_REGISTRY)).mirror(lambda key, value: changes.append((key, value)))
    at_start = dict(mirror.items())
    await kv.put("worker.a", b"1", ttl_s=1)
    await kv.put("worker.a", b"2", ttl_s=1)
    await kv.delete("worker.old")
    await eventually(lambda: mirror.get("worker.a") == b"2" and mirror.get("worker.old") is None)
    await eventually(lambda: mirror.get("worker.a") is None, 5)
    await kv.create("worker.a", b"3", ttl_s=60)
    await eventually(lambda: mirror.get("worker.a") == b"3")
    await mirror.stop()
    await kv.put("worker.a", b"4")
    await asyncio.sleep(0.05)

    assert at_start == {"worker.old": b"0"}
    assert changes == [
        ("worker.old", b"0"),
        ("worker.a", b"1"),
        ("worker.a", b"2"),
        ("worker.old", None),
        ("worker.a", None),
        ("worker.a", b"3"),
    ]


async def test_registry_entry_lives_one_lease_unless_renewed_or_told_otherwise(rig: Rig) -> None:
    kv = await (await rig.bus()).kv(subjects.BUCKET_REGISTRY)

    await kv.put("worker.lease", b"1")
    await kv.put("worker.renewed", b"1", ttl_s=2)
    await asyncio.sleep(1.5)
    await kv.put("worker.renewed", b"1", ttl_s=2)
    await asyncio.sleep(1.5)
    alive = [await kv.get("worker.lease"), await kv.get("worker.renewed")]
    await asyncio.sleep(1.7)

    assert None not in alive
    assert await kv.get("worker.lease") is None
    assert await kv.get("worker.renewed") is None


async def test_object_of_any_size_comes_back_whole_to_everybody_and_is_replaced(rig: Rig) -> None:
    bus, other = await rig.bus(), await rig.bus()
    mine, theirs = await bus.objects(subjects.OBJECTS_FILES), await other.objects(subjects.OBJECTS_FILES)
    large = bytes(range(256)) * 40_000  # above the largest message, and several pages of chunks

    await mine.put("a b/c", large)
    await mine.put("empty", b"")
    first = await theirs.get("a b/c")
    await mine.put("a b/c", b"short")

    assert first == large
    assert [await theirs.get(name) for name in ("a b/c", "empty", "nothing")] == [b"short", b"", None]


async def test_deleted_or_expired_object_is_gone(rig: Rig) -> None:
    bus = await rig.bus()
    objects = await bus.objects(subjects.OBJECTS_FILES)

    await objects.put("deleted", b"x")
    await objects.put("short", b"x" * 300_000, ttl_s=1)
    await objects.put("long", b"y", ttl_s=60)
    await objects.delete("deleted")
    await objects.delete("nothing")
    await asyncio.sleep(2.2)

    assert [await objects.get(name) for name in ("deleted", "short", "long")] == [None, None, b"y"]


async def test_entries_below_a_prefix_are_listed_and_purged(rig: Rig) -> None:
    bus, other = await rig.bus(), await rig.bus()
    bucket, same = await bus.kv(subjects.BUCKET_LINES), await other.kv(subjects.BUCKET_LINES)
    for key in ("job1.1", "job1.2", "job1.3", "job10.1"):
        await bucket.create(key, key.encode())
    await bucket.put("job1.1", b"again")
    await bucket.delete("job1.2")

    found = await same.entries("job1")
    none = await same.entries("job2")
    await bucket.purge("job1")
    left = [await same.entries(prefix) for prefix in ("job1", "job10")]

    assert [(key, entry.value) for key, entry in found.items()] == [("job1.3", b"job1.3"), ("job1.1", b"again")]
    assert found["job1.1"].revision > found["job1.3"].revision
    assert (none, left[0], list(left[1])) == ({}, {}, ["job10.1"])
    assert await bucket.create("job1.3", b"anew")
