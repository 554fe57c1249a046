"""One connection to one account of the broker: reconnects for ever, counts what is lost, speaks our errors."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from fleet_common.bus.cancellation import swallowing_no_cancel
from fleet_common.errors import BusError, BusTimeoutError, NoResponderError
from fleet_common.settings import BusSettings

log = structlog.get_logger(__name__)

_RECONNECT_WAIT_S = 0.2
_PING_INTERVAL_S = 10
_POLL_S = 0.02
#: A request lost with a dying connection is tried again after that long.
_ATTEMPT_S = 1.0
_AGAIN_S = 0.05
_REFUSED = "Authorization Violation"
#: Core messages kept while the broker is away; more raise BusError.
_PENDING_BYTES = 8 << 20
#: A burst of events must not be dropped on the way to a busy loop (nats-py drops silently beyond these).
_SUBSCRIPTION_MSGS = 1 << 20
_SUBSCRIPTION_BYTES = 256 << 20


@dataclass(slots=True)
class ConnectionStats:
    """Totals since the start.

    Attributes:
        num_drops: messages the client library dropped because a callback was too slow.
        num_errors: errors the broker or the socket reported.
        num_reconnects: times the connection came back.
    """

    num_drops: int = 0
    num_errors: int = 0
    num_reconnects: int = 0

    def for_metrics(self) -> tuple[int, int]:
        """What `BusCollector` shows."""
        return self.num_drops, self.num_reconnects


@dataclass(frozen=True, slots=True)
class Login:
    """How to reach one account. An empty password: no credentials."""

    url: str
    user: str
    password: str
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 5.0

    @property
    def inbox_prefix(self) -> str:
        """Replies arrive below it; other users cannot listen there."""
        return f"_INBOX_{self.user}"


def logins(settings: BusSettings) -> tuple[Login, Login]:
    """The work and the control login of a process."""
    tls = ssl.create_default_context(cafile=str(settings.tls_ca)) if settings.tls_ca else None

    def login(user: str, password: str) -> Login:
        return Login(settings.url, user, password, tls, settings.connect_timeout_s)

    return (
        login(settings.user, settings.work_password.get_secret_value()),
        login(f"{settings.user}_control", settings.control_password.get_secret_value()),
    )


OnMessage = Callable[[Msg], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Listening:
    """A core subscription, re-made when the client has to be."""

    subject: str
    on_message: OnMessage
    subscription: NatsSubscription


@contextlib.contextmanager
def bus_errors(what: str) -> Iterator[None]:
    """Around calls of nats-py: its errors become ours, and a cancellation stays one."""
    try:
        with swallowing_no_cancel():
            yield
    except nats.errors.NoRespondersError as err:
        raise NoResponderError(f"{what}: nobody listens") from err
    except (nats.errors.TimeoutError, TimeoutError) as err:
        raise BusTimeoutError(f"{what}: no answer in time") from err
    except (nats.errors.Error, OSError) as err:
        raise BusError(f"{what}: {err}") from err


class Connection:
    """A nats-py client and its state."""

    def __init__(self, login: Login, name: str, on_reconnected: Callable[[], None]) -> None:
        """`on_reconnected` is called after each reconnect; it must not raise."""
        self.login = login
        self.name = name
        self.stats = ConnectionStats()
        self._told_reconnected = on_reconnected
        self._client = Client()
        self._subscriptions: list[Listening] = []
        self._sessions_before = 0
        self._has_started = False
        self._is_closing = False
        self._rebuilding: asyncio.Task[None] | None = None
        self._last_error = ""

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def session(self) -> int:
        """Grows with each reconnect: pull requests of an older session are gone."""
        return self._sessions_before + int(self._client.stats["reconnects"])

    async def open(self) -> None:
        """Connect. Raises BusError when that does not work within the connect timeout."""
        login = self.login
        self._has_started = True
        credentials = {"user": login.user, "password": login.password} if login.password else {}
        try:
            async with asyncio.timeout(login.connect_timeout_s):
                with swallowing_no_cancel():
                    await self._client.connect(
                        login.url,
                        name=self.name,
                        error_cb=self._on_error,
                        disconnected_cb=self._on_disconnected,
                        reconnected_cb=self._on_reconnected,
                        closed_cb=self._on_closed,
                        connect_timeout=max(1, int(login.connect_timeout_s)),
                        reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int, used as seconds
                        max_reconnect_attempts=-1,
                        ping_interval=_PING_INTERVAL_S,
                        inbox_prefix=login.inbox_prefix,
                        pending_size=_PENDING_BYTES,
                        tls=login.tls,
                        **credentials,  # type: ignore[arg-type]
                    )
        except (TimeoutError, nats.errors.Error, OSError) as err:
            raise BusError(f"cannot reach the broker at {login.url}: {self._last_error or err}") from err

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait for the broker. Raises BusError when it does not come back in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self._client.is_connected:
            if self._is_closing:
                raise BusError("this bus is closed")
            if time.monotonic() >= deadline_s:
                raise BusError(f"the broker is away: {self._last_error}")
            await asyncio.sleep(_POLL_S)

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """Ask and wait for the answer; waits for the connection first, within the same time."""
        deadline_s = time.monotonic() + timeout_s
        await self.wait_connected(timeout_s)
        with bus_errors(subject):
            return await self._client.request(
                subject, payload, timeout=max(0.001, deadline_s - time.monotonic()), headers=headers
            )

    async def request_again(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> tuple[Msg, int]:
        """`request` for what may be sent twice: tried again within `timeout_s`, over a reconnect if need be.

        Returns:
            The answer and the number of attempts.
        """
        deadline_s = time.monotonic() + timeout_s
        num_attempts = 0
        while True:
            num_attempts += 1
            left_s = deadline_s - time.monotonic()
            try:
                return await self.request(subject, payload, min(left_s, _ATTEMPT_S), headers), num_attempts
            except BusError:
                # nats.py #529: the first request after a reconnect may fail; in a cluster, streams move.
                if time.monotonic() + _AGAIN_S >= deadline_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Core publish; kept in a bounded buffer while the broker is away."""
        with bus_errors(subject):
            await self._client.publish(subject, payload, reply=reply)

    async def subscribe(self, subject: str, on_message: OnMessage) -> Listening:
        """Core subscription; it survives reconnects."""
        listening = Listening(subject, on_message, await self._subscribe(subject, on_message))
        self._subscriptions.append(listening)
        return listening

    async def unsubscribe(self, listening: Listening) -> None:
        """End a subscription; messages not handed over yet are dropped. Best effort."""
        self._forget(listening)
        with contextlib.suppress(nats.errors.Error), swallowing_no_cancel():
            await listening.subscription.unsubscribe()

    async def drain(self, listening: Listening) -> None:
        """End a subscription once everything on its way was handed over. Best effort."""
        if not self._client.is_connected:
            await self.unsubscribe(listening)
            return
        self._forget(listening)
        with contextlib.suppress(nats.errors.Error), swallowing_no_cancel():
            await listening.subscription.drain()  # type: ignore[no-untyped-call]  # nats-py leaves it untyped

    def new_inbox(self) -> str:
        """A fresh subject only this connection's user may listen on."""
        return self._client.new_inbox()

    async def flush(self, timeout_s: float) -> None:
        """Wait until the broker has seen everything sent so far."""
        with bus_errors("flush"):
            await self._client.flush(timeout=max(1, int(timeout_s)))

    async def close(self) -> None:
        """Leave; messages not flushed are lost."""
        self._is_closing = True
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])
        if self._has_started and not self._client.is_closed:
            with contextlib.suppress(nats.errors.Error, OSError), swallowing_no_cancel():
                await self._client.close()

    async def _subscribe(self, subject: str, on_message: OnMessage) -> NatsSubscription:
        with bus_errors(subject):
            return await self._client.subscribe(
                subject,
                cb=on_message,
                pending_msgs_limit=_SUBSCRIPTION_MSGS,
                pending_bytes_limit=_SUBSCRIPTION_BYTES,
            )

    def _forget(self, listening: Listening) -> None:
        if listening in self._subscriptions:
            self._subscriptions.remove(listening)

    async def _rebuild(self) -> None:
        """nats-py gives up for good on most errors the broker reports: begin again with a new client."""
        self._sessions_before = self.session + 1
        while True:
            self._client = Client()
            try:
                await self.open()
                for listening in self._subscriptions:
                    listening.subscription = await self._subscribe(listening.subject, listening.on_message)
            except BusError as err:
                log.warning("bus_not_rebuilt", user=self.login.user, error=str(err))
                with swallowing_no_cancel():
                    await self._client.close()
                await asyncio.sleep(_RECONNECT_WAIT_S)
            else:
                await self._on_reconnected()
                return

    async def _on_error(self, error: Exception) -> None:
        # nats-py reports dropped messages nowhere else.
        self.stats.num_errors += 1
        if _REFUSED not in self._last_error:  # that says more than the resets that come with it
            self._last_error = str(error) or type(error).__name__
        if isinstance(error, nats.errors.SlowConsumerError):
            self.stats.num_drops += 1
            if self.stats.num_drops.bit_count() == 1:  # 1, 2, 4, ...: one line per message would make it worse
                log.error("bus_message_dropped", subject=error.subject, num_drops=self.stats.num_drops)
        elif isinstance(error, (OSError, nats.errors.UnexpectedEOF, TimeoutError)):
            log.debug("bus_connection_error", error=self._last_error)
        else:
            log.warning("bus_error", error=self._last_error, error_kind=type(error).__name__)

    async def _on_disconnected(self) -> None:
        if not self._client.is_closed:
            log.warning("bus_disconnected", user=self.login.user)

    async def _on_reconnected(self) -> None:
        self.stats.num_reconnects += 1
        self._last_error = ""
        log.info("bus_reconnected", user=self.login.user)
        self._told_reconnected()

    async def _on_closed(self) -> None:
        if self._is_closing or (self._rebuilding is not None and not self._rebuilding.done()):
            return
        log.error("bus_connection_given_up", user=self.login.user, error=self._last_error)
        self._rebuilding = asyncio.get_running_loop().create_task(self._rebuild(), name="bus rebuild")
