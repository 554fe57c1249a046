"""The bus on NATS: two connections (work and control account) behind one object."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable

import structlog
from nats.aio.msg import Msg

from fleet_common.bus import js, topology
from fleet_common.bus.connection import Connection, ConnectionStats, Listening, logins
from fleet_common.bus.kv import NatsKv, NatsMirror
from fleet_common.bus.nats_admin import DeadWatch, NatsAdmin
from fleet_common.bus.objects import FULL_CODES, NatsObjects
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
from fleet_common.bus.pull import PULL_EXPIRES_S, NatsPull
from fleet_common.bus.topology import Account
from fleet_common.errors import BusError, ContractError, QueueFullError
from fleet_common.settings import BusSettings
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.work import MAX_TASK_BYTES, DeadLetter

log = structlog.get_logger(__name__)

_CLOSE_S = 5.0


async def connect_bus(settings: BusSettings, name: str) -> NatsBus:
    """Open both connections of a process. Raises BusError when the broker cannot be reached in time.

    Args:
        name: what the broker's monitoring shows.
    """
    work, control = logins(settings)
    bus = NatsBus(settings.request_timeout_s, settings.pull_expires_s)
    try:
        await bus.open(Connection(work, name, bus.wake), Connection(control, name, bus.wake))
    except BaseException:
        await bus.close()
        raise
    return bus


class NatsBus:
    """`Bus` and `BusAdmin`; made by `connect_bus`."""

    def __init__(self, request_timeout_s: float, pull_expires_s: float = PULL_EXPIRES_S) -> None:
        self.request_timeout_s = request_timeout_s
        self._pull_expires_s = pull_expires_s
        self._connections: dict[Account, Connection] = {}
        self._pulls: list[NatsPull | DeadWatch] = []
        self._mirrors: list[NatsMirror] = []
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._reconnected = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._admin: NatsAdmin | None = None

    async def open(self, work: Connection, control: Connection) -> None:
        """Connect both. Raises BusError."""
        self._connections = {Account.WORK: work, Account.CONTROL: control}
        for connection in self._connections.values():
            await connection.open()
        self._admin = NatsAdmin(work, self.request_timeout_s)
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise(), name="bus supervisor")

    def wake(self) -> None:
        """A connection came back."""
        for pull in self._pulls:
            pull.poke()
        self._reconnected.set()

    def connection(self, account: Account) -> Connection:
        """The connection to an account."""
        try:
            return self._connections[account]
        except KeyError as err:
            raise BusError("this bus is not open") from err

    @property
    def stats(self) -> ConnectionStats:
        """Totals of both connections."""
        both = [connection.stats for connection in self._connections.values()]
        return ConnectionStats(
            sum(stats.num_drops for stats in both),
            sum(stats.num_errors for stats in both),
            sum(stats.num_reconnects for stats in both),
        )

    @property
    def is_connected(self) -> bool:
        return bool(self._connections) and all(c.is_connected for c in self._connections.values())

    async def publish_work(self, subject: str, payload: bytes, *, message_id: str, ttl_s: float) -> bool:
        if len(payload) > MAX_TASK_BYTES:
            raise ContractError(f"a work message of {len(payload)} bytes is above {MAX_TASK_BYTES}")
        headers = {"Nats-Msg-Id": message_id, "Nats-TTL": str(max(1, math.ceil(ttl_s)))}
        work = self.connection(Account.WORK)
        message, num_attempts = await work.request_again(subject, payload, self.request_timeout_s, headers)
        try:
            ack = js.decode_ack(subject, message)
        except js.JetStreamError as err:
            if err.err_code in FULL_CODES:
                raise QueueFullError(f"{subject}: {err.description}") from err
            raise
        # A duplicate on a second attempt is our own first one, whose answer was lost.
        return not ack.duplicate or num_attempts > 1

    async def pull(
        self,
        stage: Stage,
        pool: str,
        priority_class: PriorityClass,
        lane: str,
        on_message: Callable[[WorkMessage], None],
    ) -> Pull:
        pull = NatsPull(
            self.connection(Account.WORK),
            subjects.work_stream(stage),
            subjects.work_consumer(pool, priority_class, lane),
            on_message,
            self.request_timeout_s,
            self._pull_expires_s,
        )
        self._pulls.append(pull)
        return pull

    async def publish(self, subject: str, payload: bytes) -> None:
        await self._of(subject).publish(subject, payload)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        answer = await self._of(subject).request(subject, payload, timeout_s)
        return answer.data

    async def respond(self, message: BusMessage, payload: bytes) -> None:
        if message.reply is not None:
            await self._of(message.subject).publish(message.reply, payload)

    async def subscribe(self, subject: str, on_message: Callable[[BusMessage], Awaitable[None]]) -> Subscription:
        async def hand_over(message: Msg) -> None:
            await on_message(BusMessage(message.subject, message.data, message.reply or None))

        connection = self._of(subject)
        subscription = await connection.subscribe(subject, hand_over)
        # Returns once the broker knows of it: what is published from now on is heard.
        await connection.flush(self.request_timeout_s)
        return _CoreSubscription(connection, subscription)

    async def kv(self, bucket: str) -> KeyValue:
        try:
            spec = topology.bucket(bucket)
        except KeyError as err:
            raise BusError(f"the fleet has no bucket {bucket}") from err
        connection = self.connection(spec.account)
        await self._check_bucket(connection, spec.stream, bucket)
        return NatsKv(connection, spec, self.request_timeout_s, self._mirrors)

    async def objects(self, bucket: str) -> ObjectStore:
        try:
            spec = topology.object_bucket(bucket)
        except KeyError as err:
            raise BusError(f"the fleet has no object bucket {bucket}") from err
        connection = self.connection(spec.account)
        await self._check_bucket(connection, spec.stream, bucket)
        return NatsObjects(connection, spec, self.request_timeout_s)

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_reconnect.append(callback)

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(_CLOSE_S / 2):
                await asyncio.gather(*(pull.stop() for pull in self._pulls))
                await asyncio.gather(*(mirror.stop() for mirror in self._mirrors))
                if self.is_connected:
                    await asyncio.gather(*(c.flush(_CLOSE_S / 2) for c in self._connections.values()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S / 2):
                await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    async def pool_pending(self) -> list[ConsumerBacklog]:
        return await self._administration().pool_pending()

    async def max_deliveries(self, on_dead: Callable[[DeadDelivery], Awaitable[None]]) -> Subscription:
        watch = await self._administration().max_deliveries(on_dead)
        self._pulls.append(watch)
        return watch

    async def take(
        self, stage: Stage, pool: str, priority_class: PriorityClass, lane: str, limit: int
    ) -> list[WorkMessage]:
        return await self._administration().take(stage, pool, priority_class, lane, limit)

    async def publish_dead(self, stage: Stage, letter: DeadLetter) -> None:
        await self._administration().publish_dead(stage, letter)

    async def _check_bucket(self, connection: Connection, stream: str, bucket: str) -> None:
        try:
            await js.api(connection, f"STREAM.INFO.{stream}", None, self.request_timeout_s)
        except js.JetStreamError as err:
            if err.is_not_found:
                raise BusError(f"no bucket {bucket}: run `fleet bus apply`") from err
            raise

    def _administration(self) -> NatsAdmin:
        if self._admin is None:
            raise BusError("this bus is not open")
        return self._admin

    def _of(self, subject: str) -> Connection:
        return self.connection(topology.account_of(subject))

    async def _supervise(self) -> None:
        """After a reconnect: mirrors read again, then whoever asked to be told."""
        while True:
            await self._reconnected.wait()
            for connection in self._connections.values():
                await self._guarded(functools.partial(connection.wait_connected, math.inf))
            self._reconnected.clear()
            for mirror in list(self._mirrors):
                await self._guarded(mirror.read_again)
            for callback in list(self._on_reconnect):
                await self._guarded(callback)

    async def _guarded(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except BusError as err:
            # The broker went away again: the next reconnect repeats all of this.
            log.warning("bus_reconnect_step_failed", error=str(err))
        except Exception:
            log.exception("bus_reconnect_step_failed")


class _CoreSubscription:
    def __init__(self, connection: Connection, subscription: Listening) -> None:
        self._connection = connection
        self._subscription = subscription

    async def stop(self) -> None:
        await self._connection.unsubscribe(self._subscription)
