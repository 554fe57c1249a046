"""What the mover and `fleet status` need of NATS: backlogs, dead items, draining of consumers without live workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from nats.aio.msg import Msg

from fleet_common.bus import js, topology
from fleet_common.bus.connection import Connection
from fleet_common.bus.port import ConsumerBacklog, DeadDelivery, WorkMessage
from fleet_common.bus.pull import NatsPull, NatsWorkMessage
from fleet_common.errors import BusError
from fleet_contracts import codec, subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.work import DeadLetter

log = structlog.get_logger(__name__)

_TAKE_EXPIRES_S = 1.0
_TELL_AGAIN_S = 1.0
_NS = 1_000_000_000
_STAGES = {subjects.work_stream(stage): stage for stage in Stage}


class _Advisory(msgspec.Struct):
    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


_decode_advisory = msgspec.json.Decoder(_Advisory).decode


class NatsDeadDelivery:
    """An item at `max_deliver`. Settling deletes it from the work stream, and the advisory with it."""

    def __init__(
        self,
        connection: Connection,
        stored: js.StoredMessage,
        advisory: _Advisory,
        notice: WorkMessage,
        timeout_s: float,
    ) -> None:
        self._connection = connection
        self._stored = stored
        self._advisory = advisory
        self._notice = notice
        self._timeout_s = timeout_s
        self.is_settled = False

    @property
    def stage(self) -> Stage:
        return _STAGES[self._advisory.stream]

    @property
    def payload(self) -> bytes:
        return self._stored.payload

    @property
    def subject(self) -> str:
        return self._stored.subject

    @property
    def num_delivered(self) -> int:
        return self._advisory.deliveries

    async def settle(self) -> None:
        body = {"seq": self._advisory.stream_seq, "no_erase": True}
        try:
            await js.api(self._connection, f"STREAM.MSG.DELETE.{self._advisory.stream}", body, self._timeout_s)
        except js.JetStreamError as err:
            # A worker thought dead may have acked it meanwhile.
            log.info("dead_item_gone", stream=self._advisory.stream, error=str(err))
        await self._notice.ack()
        self.is_settled = True


class DeadWatch:
    """Pulls advisories one by one, as long as it is not stopped."""

    def __init__(
        self, connection: Connection, on_dead: Callable[[DeadDelivery], Awaitable[None]], timeout_s: float
    ) -> None:
        self._connection = connection
        self._on_dead = on_dead
        self._timeout_s = timeout_s
        self._notices: asyncio.Queue[WorkMessage] = asyncio.Queue()
        self._pull = NatsPull(
            connection, topology.ADVISORY_STREAM, topology.ADVISORY_CONSUMER, self._notices.put_nowait, timeout_s
        )
        self._pull.want(1)
        self._is_stopped = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dead watch")

    def poke(self) -> None:
        """The connection came back."""
        self._pull.poke()

    async def stop(self) -> None:
        self._is_stopped = True
        await self._pull.stop()
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while not self._is_stopped:
            notice = await self._notices.get()
            try:
                await self._handle(notice)
            except BusError as err:
                # Neither settled nor put off: the broker tells it again by itself.
                log.warning("dead_item_postponed", error=str(err))
            self._pull.want(1)

    async def _handle(self, notice: WorkMessage) -> None:
        try:
            advisory = _decode_advisory(notice.payload)
        except msgspec.DecodeError as err:
            log.error("advisory_undecodable", error=str(err))
            await notice.term("undecodable")
            return
        stored = await js.message_by_seq(self._connection, advisory.stream, advisory.stream_seq, self._timeout_s)
        if stored is None or advisory.stream not in _STAGES:
            await notice.ack()
            return
        dead = NatsDeadDelivery(self._connection, stored, advisory, notice, self._timeout_s)
        try:
            await self._on_dead(dead)
        except Exception:
            # A callback that raises must not end the watch.
            log.exception("dead_item_callback_failed", subject=stored.subject)
        if not dead.is_settled:
            await notice.nak(_TELL_AGAIN_S)


class NatsAdmin:
    """`BusAdmin` over the work connection."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def pool_pending(self) -> list[ConsumerBacklog]:
        found: list[ConsumerBacklog] = []
        for stream, stage in _STAGES.items():
            found.extend(await self._stage_pending(stream, stage))
        return found

    async def max_deliveries(self, on_dead: Callable[[DeadDelivery], Awaitable[None]]) -> DeadWatch:
        name = f"CONSUMER.INFO.{topology.ADVISORY_STREAM}.{topology.ADVISORY_CONSUMER}"
        await js.api(self._connection, name, None, self._timeout_s)
        return DeadWatch(self._connection, on_dead, self._timeout_s)

    async def take(
        self, stage: Stage, pool: str, priority_class: PriorityClass, lane: str, limit: int
    ) -> list[WorkMessage]:
        inbox = self._connection.new_inbox()
        arrived: asyncio.Queue[Msg] = asyncio.Queue()

        async def on_message(message: Msg) -> None:
            arrived.put_nowait(message)

        subscription = await self._connection.subscribe(inbox, on_message)
        try:
            consumer = subjects.work_consumer(pool, priority_class, lane)
            body = {"batch": limit, "no_wait": True, "expires": int(_TAKE_EXPIRES_S * _NS)}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.work_stream(stage)}.{consumer}"
            await self._connection.publish(subject, msgspec.json.encode(body), reply=inbox)
            return await self._collect(arrived, limit)
        finally:
            await self._connection.drain(subscription)

    async def publish_dead(self, stage: Stage, letter: DeadLetter) -> None:
        payload = codec.encode(letter)
        subject = subjects.dead(stage)
        message, _ = await self._connection.request_again(subject, payload, self._timeout_s)
        js.decode_ack(subject, message)

    async def _stage_pending(self, stream: str, stage: Stage) -> list[ConsumerBacklog]:
        try:
            consumers = await js.api_pages(
                self._connection, f"CONSUMER.LIST.{stream}", {}, "consumers", self._timeout_s
            )
        except js.JetStreamError as err:
            if err.is_not_found:
                return []
            raise
        found = []
        for consumer in consumers:
            parsed = topology.parse_consumer(str(consumer["name"]))
            if parsed is not None:
                pending = int(consumer.get("num_pending", 0)), int(consumer.get("num_ack_pending", 0))
                found.append(ConsumerBacklog(stage, *parsed, *pending))
        return found

    async def _collect(self, arrived: asyncio.Queue[Msg], limit: int) -> list[WorkMessage]:
        taken: list[WorkMessage] = []
        while len(taken) < limit:
            try:
                async with asyncio.timeout(2 * _TAKE_EXPIRES_S):
                    message = await arrived.get()
            except TimeoutError:
                break
            if message.headers and message.headers.get("Status") and not message.reply:
                break
            taken.append(NatsWorkMessage(self._connection, message, self._timeout_s))
        return taken
