"""A continuous pull on a durable consumer: raw MSG.NEXT, long expiry, a watchdog, exact credits."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from nats.aio.msg import Msg

from fleet_common.bus.connection import Connection, Listening
from fleet_common.bus.port import WorkMessage
from fleet_common.errors import BusError

log = structlog.get_logger(__name__)

#: Shorter than `ack_wait`: what is parked for a worker that froze must have lapsed by the time its messages are
#: delivered again, or they would be delivered to it. A new request follows the end of the old one within a round trip.
PULL_EXPIRES_S = 4.0
_TURN_S = 1.0
_BACK_OFF_S = 0.5
#: A target of 0 that lasts that long withdraws what is parked; shorter ones are not worth the round trips.
_WITHDRAW_S = 0.05
#: Targets above this ask again only when half is used up, so that a burst is not one request per message.
_SMALL_TARGET = 8
_NS = 1_000_000_000


class NatsWorkMessage:
    """One delivery. Its reply subject says which, and is where it is settled."""

    def __init__(self, connection: Connection, message: Msg, timeout_s: float) -> None:
        self._connection = connection
        self._message = message
        self._timeout_s = timeout_s
        # $JS.ACK.<stream>.<consumer>.<delivered>..., or with <domain>.<account> before the stream.
        tokens = message.reply.split(".")
        self._delivery = int(tokens[4] if len(tokens) == 9 else tokens[6])

    @property
    def payload(self) -> bytes:
        return self._message.data

    @property
    def subject(self) -> str:
        return self._message.subject

    @property
    def delivery(self) -> int:
        return self._delivery

    async def ack(self) -> None:
        await self._settle(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        delay = msgspec.json.encode({"delay": math.ceil(delay_s * _NS)}) if delay_s > 0 else b""
        await self._settle(b"-NAK " + delay if delay else b"-NAK")

    async def in_progress(self) -> None:
        if not self._connection.is_connected:
            return
        try:
            await self._connection.publish(self._message.reply, b"+WPI")
        except BusError as err:
            log.debug("work_heartbeat_lost", error=str(err))

    async def term(self, reason: str) -> None:
        await self._settle(b"+TERM " + reason.encode())

    async def _settle(self, verdict: bytes) -> None:
        """Send it and wait for the answer; settling twice is harmless."""
        await self._connection.request_again(self._message.reply, verdict, self._timeout_s)


@dataclass(slots=True)
class _Request:
    """A parked MSG.NEXT: how much of it is left, and until when the broker keeps it."""

    num_left: int
    ends_s: float
    session: int


class NatsPull:
    """See `fleet_common.bus.port.Pull`."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        on_message: Callable[[WorkMessage], None],
        timeout_s: float,
        expires_s: float = PULL_EXPIRES_S,
    ) -> None:
        self._expires_s = expires_s
        # The broker wants at least two heartbeats per request.
        self._heartbeat_s = expires_s / 3
        self._connection = connection
        self._consumer = consumer
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._on_message = on_message
        self._timeout_s = timeout_s
        self._target = 0
        self._requests: deque[_Request] = deque()
        self._inbox = ""
        self._subscription: Listening | None = None
        self._heard_s = 0.0
        self._not_before_s = 0.0
        self._zero_since_s = 0.0
        self._is_stopped = False
        self._is_refused = False
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pull {consumer}")

    def want(self, count: int) -> None:
        self._set_target(max(0, count))
        self._wake.set()

    def poke(self) -> None:
        """The connection came back: look at once whether to ask again."""
        self._wake.set()

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self._target = 0
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._withdraw()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_WITHDRAW_S if self._is_withdrawing() else _TURN_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._turn()
            except BusError as err:
                log.warning("pull_failed", consumer=self._consumer, error=str(err))
                self._back_off()
            except Exception:
                # Whatever it was, a worker whose pull has ended would look healthy and do nothing.
                log.exception("pull_failed", consumer=self._consumer)
                self._back_off()

    async def _turn(self) -> None:
        now_s = time.monotonic()
        session = self._connection.session
        while self._requests and (self._requests[0].session != session or self._requests[0].ends_s < now_s):
            self._requests.popleft()
        outstanding = self._outstanding()
        if outstanding and self._target == 0 and now_s - self._zero_since_s >= _WITHDRAW_S:
            await self._withdraw()
            return
        if outstanding and now_s - self._heard_s > 2 * self._heartbeat_s + _TURN_S:
            log.warning("pull_silent", consumer=self._consumer)
            await self._withdraw()
            outstanding = 0
        missing = self._target - outstanding
        is_time = self._target <= _SMALL_TARGET or 2 * outstanding <= self._target
        if missing > 0 and is_time and now_s >= self._not_before_s and self._connection.is_connected:
            await self._ask(missing)

    async def _ask(self, count: int) -> None:
        if self._subscription is None:
            self._inbox = self._connection.new_inbox()
            self._subscription = await self._connection.subscribe(self._inbox, self._on_arrival)
        now_s = time.monotonic()
        if not self._requests:
            self._heard_s = now_s
        # The broker's own end comes first (408); ours only clears what it forgot.
        self._requests.append(_Request(count, now_s + self._expires_s + 2.0, self._connection.session))
        body = {"batch": count, "expires": int(self._expires_s * _NS), "idle_heartbeat": int(self._heartbeat_s * _NS)}
        await self._connection.publish(self._subject, msgspec.json.encode(body), reply=self._inbox)

    async def _withdraw(self) -> None:
        """Leave the inbox: the broker drops requests nobody listens for; what is on its way is still handed over."""
        subscription, self._subscription = self._subscription, None
        self._requests.clear()
        if subscription is not None:
            await self._connection.drain(subscription)
        self._requests.clear()

    async def _on_arrival(self, message: Msg) -> None:
        self._heard_s = time.monotonic()
        status = message.headers.get("Status") if message.headers and not message.reply else None
        if status is not None:
            self._on_status(status, message)
            return
        self._is_refused = False
        self._shrink(1)
        self._set_target(max(0, self._target - 1))
        work = NatsWorkMessage(self._connection, message, self._timeout_s)
        if self._is_stopped:
            await work.nak()
        else:
            self._on_message(work)

    def _on_status(self, status: str, message: Msg) -> None:
        if status == "100" or message.subject != self._inbox:
            return
        headers = message.headers or {}
        pending = headers.get("Nats-Pending-Messages")
        if pending is not None:
            self._shrink(int(pending))
        else:
            self._requests.clear()
        if status not in ("404", "408"):
            if not self._is_refused:
                reason = headers.get("Description", "")
                log.warning("pull_refused", consumer=self._consumer, status=status, reason=reason)
            self._is_refused = True
            self._back_off()
        self._wake.set()

    def _set_target(self, target: int) -> None:
        if target == 0 and self._target > 0:
            self._zero_since_s = time.monotonic()
        self._target = target

    def _is_withdrawing(self) -> bool:
        return self._target == 0 and bool(self._requests)

    def _back_off(self) -> None:
        self._not_before_s = time.monotonic() + _BACK_OFF_S

    def _outstanding(self) -> int:
        return sum(request.num_left for request in self._requests)

    def _shrink(self, count: int) -> None:
        while count > 0 and self._requests:
            first = self._requests[0]
            used = min(count, first.num_left)
            first.num_left -= used
            count -= used
            if first.num_left == 0:
                self._requests.popleft()
