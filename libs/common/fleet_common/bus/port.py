"""What the fleet needs of a message bus. Adapters: `nats` (real), `memory` (unit tests)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.work import DeadLetter


class WorkMessage(Protocol):
    """One delivery of a work item. Only the stage runner settles it."""

    @property
    def payload(self) -> bytes: ...

    @property
    def subject(self) -> str: ...

    @property
    def delivery(self) -> int:
        """Broker's delivery count, from 1."""

    async def ack(self) -> None:
        """Done: never deliver again. Waits for the broker's answer. Raises BusError."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Not done: deliver again. Spends one of `max_deliver`."""

    async def in_progress(self) -> None:
        """Heartbeat: restart the ack timer. Best effort, never raises for a lost connection."""

    async def term(self, reason: str) -> None:
        """Never deliver again and drop it (publish the dead letter first)."""


class Pull(Protocol):
    """A parked, self-renewing pull on one durable consumer."""

    def want(self, count: int) -> None:
        """Let the broker deliver up to `count` messages that are not delivered yet; each delivery uses one up.

        Sets the target (call it again after deliveries and whenever room changes); asks for more only when fewer are
        outstanding. Survives expiry and reconnects. A lower target takes effect late: what was asked for may arrive
        nevertheless, 0 withdraws it within 0.1 s.
        """

    async def stop(self) -> None:
        """Ask for nothing more; messages that arrive nevertheless are nak'd."""


@dataclass(frozen=True, slots=True)
class KvEntry:
    """A value of a bucket and its revision."""

    value: bytes
    revision: int


_KEY = re.compile(r"^[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*$")


def checked_key(key: str) -> str:
    """The key itself. Raises ValueError when it cannot be one."""
    if not _KEY.match(key):
        raise ValueError(f"no key of a bucket: {key!r}")
    return key


class KvMirror(Protocol):
    """A local copy of a bucket that follows it, and is read again in full after every reconnect."""

    def get(self, key: str) -> bytes | None: ...

    def items(self) -> Mapping[str, bytes]: ...

    @property
    def synced_monotonic_s(self) -> float:
        """When the copy was last known to be whole (monotonic seconds)."""

    async def stop(self) -> None: ...


class KeyValue(Protocol):
    """One bucket. Keys are `[A-Za-z0-9_=-]+`, several with dots between; others raise ValueError."""

    async def get(self, key: str) -> KvEntry | None: ...

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        """Write whatever is there. `ttl_s` (whole seconds, >= 1) overrides the bucket's. Returns the revision."""

    async def create(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        """Write only if the key is absent. Raises RevisionConflictError."""

    async def update(self, key: str, value: bytes, revision: int, ttl_s: float | None = None) -> int:
        """Write only if the key is at `revision`. Raises RevisionConflictError."""

    async def delete(self, key: str) -> None: ...

    async def entries(self, prefix: str) -> dict[str, KvEntry]:
        """Every key below `prefix` (whole tokens, like `job.acme`) as it is now, in the order of the last writes."""

    async def purge(self, prefix: str) -> None:
        """Forget every key below `prefix`; mirrors hear of it only when they read again."""

    async def mirror(self, on_change: Callable[[str, bytes | None], None] | None = None) -> KvMirror:
        """Follow the bucket; returns once the copy is whole. `on_change(key, value)`, None = gone (or expired)."""


class ObjectStore(Protocol):
    """One bucket of objects of any size; they outlive every service. Every call raises BusError."""

    async def put(self, name: str, data: bytes, ttl_s: float | None = None) -> None:
        """Store an object, whole or not at all; one of that name is replaced.

        Args:
            ttl_s: whole seconds, >= 1; never longer than the bucket's.
        Raises:
            QueueFullError: the bucket is at its limits.
        """

    async def get(self, name: str) -> bytes | None:
        """The whole object; None when there is none (any more)."""

    async def delete(self, name: str) -> None:
        """Forget an object; one that is not there is no error."""


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A core message. `reply` is None when nobody waits for an answer."""

    subject: str
    payload: bytes
    reply: str | None


class Subscription(Protocol):
    async def stop(self) -> None: ...


class Bus(Protocol):
    """A connection. Every call raises BusError (or a subclass) when the broker cannot be reached in time."""

    @property
    def is_connected(self) -> bool: ...

    async def publish_work(self, subject: str, payload: bytes, *, message_id: str, ttl_s: float) -> bool:
        """Store a work item in its stage's stream.

        Returns:
            False when the broker had this `message_id` already (deduplicated).
        Raises:
            QueueFullError: the stream is at its limits.
            ContractError: payload above `MAX_TASK_BYTES`.
        """

    async def pull(
        self,
        stage: Stage,
        pool: str,
        priority_class: PriorityClass,
        lane: str,
        on_message: Callable[[WorkMessage], None],
    ) -> Pull:
        """Open a pull on a durable consumer that must exist already."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Core publish: at most once, no answer."""

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Core request. Raises NoResponderError at once when nobody listens, BusTimeoutError after `timeout_s`."""

    async def respond(self, message: BusMessage, payload: bytes) -> None:
        """Answer a request."""

    async def subscribe(self, subject: str, on_message: Callable[[BusMessage], Awaitable[None]]) -> Subscription:
        """Core subscription; messages are handed over one after another, in order: keep the callback short."""

    async def kv(self, bucket: str) -> KeyValue:
        """A bucket that `fleet bus apply` made; it may live in the other account. Raises BusError if absent."""

    async def objects(self, bucket: str) -> ObjectStore:
        """A bucket of objects that `fleet bus apply` made. Raises BusError if absent."""

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call after every reconnect, once mirrors were told to read again."""

    async def close(self) -> None:
        """Flush and leave; never longer than 5 s."""


@dataclass(frozen=True, slots=True)
class ConsumerBacklog:
    """How much waits at one durable consumer.

    Attributes:
        num_pending: stored and never delivered.
        num_ack_pending: delivered and not settled.
    """

    stage: Stage
    pool: str
    priority_class: PriorityClass
    lane: str
    num_pending: int
    num_ack_pending: int


class DeadDelivery(Protocol):
    """A work item that reached `max_deliver`: no consumer sees it any more, its stream still holds it."""

    @property
    def stage(self) -> Stage: ...

    @property
    def payload(self) -> bytes: ...

    @property
    def subject(self) -> str: ...

    @property
    def num_delivered(self) -> int: ...

    async def settle(self) -> None:
        """Delete it from the work stream: call once the dead letter is stored. Raises BusError."""


class BusAdmin(Protocol):
    """What the mover and `fleet status` need besides `Bus`. Every call raises BusError."""

    async def pool_pending(self) -> list[ConsumerBacklog]:
        """The backlog of every consumer of every stage."""

    async def max_deliveries(self, on_dead: Callable[[DeadDelivery], Awaitable[None]]) -> Subscription:
        """Hear of every item that reached `max_deliver`, those that did while nobody listened included.

        One after another; an item that is not settled (or whose callback raises) comes again.
        """

    async def take(
        self, stage: Stage, pool: str, priority_class: PriorityClass, lane: str, limit: int
    ) -> list[WorkMessage]:
        """Take up to `limit` waiting messages of a consumer at once, to move them: [] when it is empty or absent."""

    async def publish_dead(self, stage: Stage, letter: DeadLetter) -> None:
        """Store a dead letter on `subjects.dead(stage)`."""
