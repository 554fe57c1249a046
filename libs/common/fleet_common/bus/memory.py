"""A bus in memory for unit tests: the whole port, real semantics, no server.

`MemoryBroker` is the server, `broker.connect()` a process's bus. With a clock given, time moves only by that clock and
`broker.tick()`; without one, ack timers and TTLs run on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import structlog

from fleet_common.bus.memory_kv import MemoryKv
from fleet_common.bus.memory_objects import MemoryObjects
from fleet_common.bus.memory_work import MemoryDeadDelivery, WorkLimits, WorkQueues
from fleet_common.bus.port import (
    BusMessage,
    ConsumerBacklog,
    DeadDelivery,
    KeyValue,
    ObjectStore,
    Pull,
    Subscription,
    WorkMessage,
)
from fleet_common.clock import Clock, SystemClock
from fleet_common.errors import BusError, BusTimeoutError, ContractError, NoResponderError
from fleet_contracts import codec, subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.work import MAX_TASK_BYTES, DeadLetter

log = structlog.get_logger(__name__)

_INBOX = "_INBOX.memory."


class MemoryBroker:
    """What a nats-server is to the fleet: shared by the buses of a test.

    Attributes:
        dead_letters: what was published by `publish_dead`.
        published: (subject, payload) of every core message, in order.
    """

    def __init__(
        self, clock: Clock | None = None, limits: WorkLimits | None = None, *, registry_ttl_s: float = 4.0
    ) -> None:
        self.dead_letters: list[DeadLetter] = []
        self.published: list[tuple[str, bytes]] = []
        self.limits = limits or WorkLimits()
        self.is_up = True
        self._is_manual = clock is not None
        self._clock = clock or SystemClock()
        self.work = WorkQueues(self.limits, self._clock.monotonic_s, self._alarm)
        self._registry_ttl_s = registry_ttl_s
        self._buckets: dict[str, MemoryKv] = {}
        self._objects: dict[str, MemoryObjects] = {}
        self._subscriptions: list[_MemorySubscription] = []
        self._inboxes: dict[str, asyncio.Future[bytes]] = {}
        self._inbox_numbers = itertools.count()
        self._buses: list[MemoryBus] = []

    def connect(self) -> MemoryBus:
        """A bus of one process."""
        bus = MemoryBus(self)
        self._buses.append(bus)
        return bus

    def tick(self) -> None:
        """Do what the clock has brought: redeliveries, expiry."""
        self.work.tick()
        for bucket in self._buckets.values():
            bucket.tick()

    def redeliver(self) -> None:
        """Let every ack timer end now."""
        self.work.tick(force=True)

    def go_down(self) -> None:
        """Every call raises BusError from now on; what is stored stays."""
        self._set_up(False)

    async def come_back(self) -> None:
        """Mirrors read again, then every bus's `on_reconnect` callbacks run, then deliveries resume."""
        self._set_up(True)
        for bus in list(self._buses):
            await bus.reconnected()
        self.work.dispatch_all()

    def bucket(self, name: str) -> MemoryKv:
        """A bucket, made on first use."""
        if name not in self._buckets:
            ttl_s = self._registry_ttl_s if name in (subjects.BUCKET_REGISTRY, subjects.BUCKET_LEADER) else None
            self._buckets[name] = MemoryKv(self._clock.monotonic_s, self._alarm, ttl_s)
        return self._buckets[name]

    def objects(self, name: str) -> MemoryObjects:
        """A bucket of objects, made on first use."""
        return self._objects.setdefault(name, MemoryObjects(self._clock.monotonic_s))

    def subscribe(self, subject: str, on_message: Callable[[BusMessage], Awaitable[None]]) -> _MemorySubscription:
        """Start a core subscription."""
        subscription = _MemorySubscription(self, subject, on_message)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: _MemorySubscription) -> None:
        """End a core subscription."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def publish(self, message: BusMessage) -> int:
        """Deliver a core message; returns how many hear it."""
        inbox = self._inboxes.get(message.subject)
        if inbox is not None:
            if not inbox.done():
                inbox.set_result(message.payload)
            return 1
        self.published.append((message.subject, message.payload))
        listeners = [s for s in self._subscriptions if matches(s.subject, message.subject)]
        for listener in listeners:
            listener.put(message)
        return len(listeners)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Publish with an inbox and wait for the first answer."""
        reply = f"{_INBOX}{next(self._inbox_numbers)}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._inboxes[reply] = answer
        try:
            if not self.publish(BusMessage(subject, payload, reply)):
                raise NoResponderError(f"nobody listens on {subject}")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as err:
            raise BusTimeoutError(f"no answer on {subject} within {timeout_s} s") from err
        finally:
            del self._inboxes[reply]

    def _set_up(self, is_up: bool) -> None:
        self.is_up = is_up
        self.work.is_up = is_up
        for bucket in self._buckets.values():
            bucket.set_up(is_up)
        for objects in self._objects.values():
            objects.is_up = is_up

    def _alarm(self, delay_s: float) -> None:
        if not self._is_manual:
            asyncio.get_running_loop().call_later(delay_s + 0.001, self.tick)


class MemoryBus:
    """`Bus` and `BusAdmin` of one process on a memory broker (its own when none is given)."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._is_closed = False
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._pulls: list[Pull] = []
        self._subscriptions: list[Subscription] = []

    @property
    def is_connected(self) -> bool:
        return self.broker.is_up and not self._is_closed

    async def publish_work(self, subject: str, payload: bytes, *, message_id: str, ttl_s: float) -> bool:
        if len(payload) > MAX_TASK_BYTES:
            raise ContractError(f"a work message of {len(payload)} bytes is above {MAX_TASK_BYTES}")
        self._check()
        return self.broker.work.publish(Stage(subject.split(".")[2]), subject, payload, message_id, ttl_s)

    async def pull(
        self,
        stage: Stage,
        pool: str,
        priority_class: PriorityClass,
        lane: str,
        on_message: Callable[[WorkMessage], None],
    ) -> Pull:
        self._check()
        pull = self.broker.work.pull(subjects.work(stage, pool, priority_class, lane), on_message)
        self._pulls.append(pull)
        return pull

    async def publish(self, subject: str, payload: bytes) -> None:
        self._check()
        self.broker.publish(BusMessage(subject, payload, None))

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        self._check()
        return await self.broker.request(subject, payload, timeout_s)

    async def respond(self, message: BusMessage, payload: bytes) -> None:
        self._check()
        if message.reply is not None:
            self.broker.publish(BusMessage(message.reply, payload, None))

    async def subscribe(self, subject: str, on_message: Callable[[BusMessage], Awaitable[None]]) -> Subscription:
        self._check()
        subscription = self.broker.subscribe(subject, on_message)
        self._subscriptions.append(subscription)
        return subscription

    async def kv(self, bucket: str) -> KeyValue:
        self._check()
        return self.broker.bucket(bucket)

    async def objects(self, bucket: str) -> ObjectStore:
        self._check()
        return self.broker.objects(bucket)

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_reconnect.append(callback)

    async def close(self) -> None:
        self._is_closed = True
        for pull in self._pulls:
            await pull.stop()
        for subscription in self._subscriptions:
            await subscription.stop()

    async def pool_pending(self) -> list[ConsumerBacklog]:
        self._check()
        return self.broker.work.backlog()

    async def max_deliveries(self, on_dead: Callable[[DeadDelivery], Awaitable[None]]) -> Subscription:
        self._check()
        subscription = _DeadSubscription(self.broker.work, on_dead)
        self._subscriptions.append(subscription)
        return subscription

    async def take(
        self, stage: Stage, pool: str, priority_class: PriorityClass, lane: str, limit: int
    ) -> list[WorkMessage]:
        self._check()
        return self.broker.work.take(subjects.work(stage, pool, priority_class, lane), limit)

    async def publish_dead(self, stage: Stage, letter: DeadLetter) -> None:
        self._check()
        self.broker.dead_letters.append(letter)
        self.broker.publish(BusMessage(subjects.dead(stage), codec.encode(letter), None))

    async def reconnected(self) -> None:
        """The broker came back."""
        if not self._is_closed:
            for callback in self._on_reconnect:
                await callback()

    def _check(self) -> None:
        if not self.is_connected:
            raise BusError("the memory broker is down" if not self.broker.is_up else "this bus is closed")


class _MemorySubscription:
    """Hands messages over one after another, in order."""

    def __init__(self, broker: MemoryBroker, subject: str, on_message: Callable[[BusMessage], Awaitable[None]]) -> None:
        self.subject = subject
        self._broker = broker
        self._on_message = on_message
        self._is_stopped = False
        self._queue: asyncio.Queue[BusMessage] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def put(self, message: BusMessage) -> None:
        self._queue.put_nowait(message)

    async def stop(self) -> None:
        self._is_stopped = True
        self._broker.unsubscribe(self)
        await _end(self._task)

    async def _run(self) -> None:
        while not self._is_stopped:
            message = await self._queue.get()
            try:
                await self._on_message(message)
            except Exception:
                # As in nats-py: a callback that raises must not end the subscription.
                log.exception("bus_callback_failed", subject=message.subject)


class _DeadSubscription:
    """Hands dead items over until each is settled."""

    def __init__(self, work: WorkQueues, on_dead: Callable[[DeadDelivery], Awaitable[None]]) -> None:
        self._work = work
        self._on_dead = on_dead
        self._is_stopped = False
        self._wake = asyncio.Event()
        self._wake.set()
        work.on_dead = self._wake.set
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        self._is_stopped = True
        await _end(self._task)

    async def _run(self) -> None:
        while not self._is_stopped:
            await self._wake.wait()
            self._wake.clear()
            for dead in list(self._work.dead):
                await self._hand_over(dead)

    async def _hand_over(self, dead: MemoryDeadDelivery) -> None:
        try:
            await self._on_dead(dead)
        except Exception:
            log.exception("bus_callback_failed", subject=dead.subject)
        if dead.item.is_settled:
            self._work.dead.remove(dead)
        else:
            self._work.tell_dead_again()


async def _end(task: asyncio.Task[None]) -> None:
    if task is not asyncio.current_task():
        task.cancel()
        await asyncio.wait([task])


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject with `*` and a trailing `>` covers another."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    for number, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > number
        if number >= len(tokens) or token not in ("*", tokens[number]):
            return False
    return len(tokens) == len(wanted)
