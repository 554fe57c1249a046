"""Buckets over JetStream: compare-and-set, per-key TTL, mirrors that do not go blind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog
from nats.aio.msg import Msg

from fleet_common.bus import js
from fleet_common.bus.connection import Connection, Listening
from fleet_common.bus.port import KvEntry, KvMirror, checked_key
from fleet_common.bus.topology import BucketSpec
from fleet_common.errors import BusError, RevisionConflictError

log = structlog.get_logger(__name__)

OnChange = Callable[[str, bytes | None], None]

_WRONG_REVISION_CODES = (10071, 10164)
_EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"
#: Safety net: differences nobody told of are found at the latest after that long.
_READ_AGAIN_S = 10.0
_MARKER_TTL = "60"


class NatsKv:
    """See `fleet_common.bus.port.KeyValue`."""

    def __init__(self, connection: Connection, spec: BucketSpec, timeout_s: float, mirrors: list[NatsMirror]) -> None:
        """`mirrors` is the bus's list of those to wake after a reconnect."""
        self._connection = connection
        self._spec = spec
        self._timeout_s = timeout_s
        self._mirrors = mirrors

    async def get(self, key: str) -> KvEntry | None:
        stored = await self._last(key)
        if stored is None or _is_gone(stored.headers):
            return None
        return KvEntry(stored.payload, stored.seq)

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        message, _ = await self._connection.request_again(
            self._subject(key), value, self._timeout_s, self._headers(ttl_s) or None
        )
        return js.decode_ack(self._spec.stream, message).seq

    async def create(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        try:
            return await self.update(key, value, 0, ttl_s)
        except RevisionConflictError:
            # The marker of a deletion or expiry counts as a revision: the key is absent all the same.
            stored = await self._last(key)
            if stored is None or not _is_gone(stored.headers):
                raise
            return await self.update(key, value, stored.seq, ttl_s)

    async def update(self, key: str, value: bytes, revision: int, ttl_s: float | None = None) -> int:
        headers = {**self._headers(ttl_s), _EXPECTED_REVISION: str(revision)}
        try:
            ack = await js.publish(self._connection, self._subject(key), value, headers, self._timeout_s)
        except js.JetStreamError as err:
            if err.err_code in _WRONG_REVISION_CODES:
                raise RevisionConflictError(f"{key}: {err.description}") from err
            raise
        return ack.seq

    async def delete(self, key: str) -> None:
        message, _ = await self._connection.request_again(
            self._subject(key), b"", self._timeout_s, {"KV-Operation": "DEL", "Nats-TTL": _MARKER_TTL}
        )
        js.decode_ack(self._spec.stream, message)

    async def entries(self, prefix: str) -> dict[str, KvEntry]:
        stored = await js.read_bucket(
            self._connection, self._spec.stream, f"{self._subject(prefix)}.>", self._timeout_s
        )
        start = len(f"$KV.{self._spec.name}.")
        return {
            message.subject[start:]: KvEntry(message.payload, message.seq)
            for message in stored
            if not _is_gone(message.headers)
        }

    async def purge(self, prefix: str) -> None:
        await js.purge(self._connection, self._spec.stream, f"{self._subject(prefix)}.>", self._timeout_s)

    async def mirror(self, on_change: OnChange | None = None) -> KvMirror:
        mirror = NatsMirror(self._connection, self._spec, on_change, self._timeout_s)
        await mirror.start()
        self._mirrors.append(mirror)
        return mirror

    async def _last(self, key: str) -> js.StoredMessage | None:
        return await js.last_by_subject(self._connection, self._spec.stream, self._subject(key), self._timeout_s)

    def _subject(self, key: str) -> str:
        return f"$KV.{self._spec.name}.{checked_key(key)}"

    def _headers(self, ttl_s: float | None) -> dict[str, str]:
        lifetime_s = ttl_s if ttl_s is not None else self._spec.default_ttl_s
        return {} if lifetime_s is None else {"Nats-TTL": str(max(1, math.ceil(lifetime_s)))}


class NatsMirror:
    """A copy of a bucket: the broker's copies of every change, and the whole bucket read again now and then.

    Per key the revision decides, so that a slow read never undoes a newer change.
    """

    def __init__(self, connection: Connection, spec: BucketSpec, on_change: OnChange | None, timeout_s: float) -> None:
        self._connection = connection
        self._spec = spec
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._copy: dict[str, bytes] = {}
        self._revisions: dict[str, int] = {}
        self._synced_s = 0.0
        self._wake = asyncio.Event()
        self._reading = asyncio.Lock()
        self._subscription: Listening | None = None
        self._task: asyncio.Task[None] | None = None

    def get(self, key: str) -> bytes | None:
        return self._copy.get(key)

    def items(self) -> Mapping[str, bytes]:
        return MappingProxyType(self._copy)

    @property
    def synced_monotonic_s(self) -> float:
        return self._synced_s

    async def start(self) -> None:
        """Listen, then read: what changes in between is not missed."""
        self._subscription = await self._connection.subscribe(self._spec.changes, self._on_message)
        await self.read_again()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"mirror {self._spec.name}")

    async def stop(self) -> None:
        self._on_change = None
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def read_again(self) -> None:
        """Read the whole bucket and take over the differences. Raises BusError."""
        async with self._reading:
            before = dict(self._revisions)
            started_s = time.monotonic()
            stored = await js.read_bucket(self._connection, self._spec.stream, self._spec.subjects, self._timeout_s)
            for message in stored:
                if self._revisions.get(message.subject) == before.get(message.subject):
                    # Also when the revision is lower: then the broker lost its data and began again.
                    self._revisions[message.subject] = 0
                self._take(message.subject, message.seq, None if _is_gone(message.headers) else message.payload)
            seen = {message.subject for message in stored}
            for subject, revision in before.items():
                if subject not in seen and self._revisions.get(subject) == revision:
                    self._forget(subject)
            self._synced_s = started_s

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_READ_AGAIN_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self.read_again()
            except BusError as err:
                log.info("mirror_not_read", bucket=self._spec.name, error=str(err))
            except Exception:
                # As with a callback: a mirror that has ended would look whole for ever.
                log.exception("mirror_not_read", bucket=self._spec.name)

    async def _on_message(self, message: Msg) -> None:
        headers = message.headers or {}
        self._take(
            headers["Nats-Subject"],
            int(headers["Nats-Sequence"]),
            None if _is_gone(headers) else message.data,
        )

    def _take(self, subject: str, revision: int, value: bytes | None) -> None:
        if revision <= self._revisions.get(subject, 0):
            return
        self._revisions[subject] = revision
        self._apply(subject, value)

    def _forget(self, subject: str) -> None:
        del self._revisions[subject]
        self._apply(subject, None)

    def _apply(self, subject: str, value: bytes | None) -> None:
        key = subject.removeprefix(f"$KV.{self._spec.name}.")
        if self._copy.get(key) == value:
            return
        if value is None:
            del self._copy[key]
        else:
            self._copy[key] = value
        if self._on_change is None:
            return
        try:
            self._on_change(key, value)
        except Exception:
            # A callback that raises must not end the mirror.
            log.exception("mirror_callback_failed", bucket=self._spec.name, key=key)


def _is_gone(headers: Mapping[str, str]) -> bool:
    """Whether a stored message says that its key was deleted or has expired."""
    return "Nats-Marker-Reason" in headers or headers.get("KV-Operation") in ("DEL", "PURGE")
