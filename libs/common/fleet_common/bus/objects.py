"""Objects over JetStream, laid out as NATS's own tools read them: chunks, then the description that makes them one."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import secrets
from datetime import UTC, datetime

import msgspec

from fleet_common.bus import js
from fleet_common.bus.connection import Connection
from fleet_common.bus.topology import ObjectBucketSpec
from fleet_common.errors import BusError, QueueFullError

#: As NATS's tools cut objects.
_CHUNK_BYTES = 128 << 10
#: Chunks per read: 4 MiB on their way at once.
_PAGE_MSGS = 32
#: An object may take this much longer than a small request, per MiB.
_SLOWEST_S_PER_MIB = 0.5
#: The broker's codes for a stream or an account without room.
FULL_CODES = (10002, 10023, 10047, 10077)


class _ObjectInfo(msgspec.Struct, omit_defaults=True):
    """The description of an object."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: str = ""
    deleted: bool = False
    options: dict[str, int] = {}


_decode_info = msgspec.json.Decoder(_ObjectInfo).decode


class NatsObjects:
    """See `fleet_common.bus.port.ObjectStore`."""

    def __init__(self, connection: Connection, spec: ObjectBucketSpec, timeout_s: float) -> None:
        self._connection = connection
        self._spec = spec
        self._timeout_s = timeout_s

    async def put(self, name: str, data: bytes, ttl_s: float | None = None) -> None:
        nuid = secrets.token_hex(12)
        before = await self._info(name)
        lifetime_s = min(ttl_s if ttl_s is not None else self._spec.default_ttl_s, self._spec.default_ttl_s)
        lifetime = str(max(1, math.ceil(lifetime_s)))
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        info = _ObjectInfo(
            name=name,
            bucket=self._spec.name,
            nuid=nuid,
            size=len(data),
            chunks=len(chunks),
            digest=_digest(data),
            mtime=datetime.now(UTC).isoformat(),
            options={"max_chunk_size": _CHUNK_BYTES},
        )
        try:
            for number, chunk in enumerate(chunks):
                headers = {"Nats-Msg-Id": f"{nuid}:{number}", "Nats-TTL": lifetime}
                await self._store(self._chunks(nuid), chunk, headers)
            headers = {"Nats-Rollup": "sub", "Nats-TTL": lifetime}
            await self._store(self._meta(name), msgspec.json.encode(info), headers)
        except BaseException:
            # What is left of a half object expires if it cannot be removed now.
            with contextlib.suppress(BusError):
                await js.purge(self._connection, self._spec.stream, self._chunks(nuid), self._timeout_s)
            raise
        if before is not None:
            await js.purge(self._connection, self._spec.stream, self._chunks(before.nuid), self._timeout_s)

    async def get(self, name: str) -> bytes | None:
        info = await self._info(name)
        if info is None:
            return None
        timeout_s = self._timeout_s + _SLOWEST_S_PER_MIB * info.size / (1 << 20)
        stored = await js.read_bucket(
            self._connection, self._spec.stream, self._chunks(info.nuid), timeout_s, page_msgs=_PAGE_MSGS
        )
        data = b"".join(message.payload for message in stored)
        if _digest(data) != info.digest:
            if await self._info(name) is None:
                return None
            raise BusError(f"the object {name} is not whole: {len(data)} of {info.size} bytes")
        return data

    async def delete(self, name: str) -> None:
        info = await self._info(name)
        await js.purge(self._connection, self._spec.stream, self._meta(name), self._timeout_s)
        if info is not None:
            await js.purge(self._connection, self._spec.stream, self._chunks(info.nuid), self._timeout_s)

    async def _info(self, name: str) -> _ObjectInfo | None:
        stored = await js.last_by_subject(self._connection, self._spec.stream, self._meta(name), self._timeout_s)
        info = _decode_info(stored.payload) if stored is not None else None
        return None if info is None or info.deleted else info

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        message, _ = await self._connection.request_again(subject, payload, self._timeout_s, headers)
        try:
            js.decode_ack(subject, message)
        except js.JetStreamError as err:
            if err.err_code in FULL_CODES:
                raise QueueFullError(f"{self._spec.name}: {err.description}") from err
            raise

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self._spec.name}.C.{nuid}"

    def _meta(self, name: str) -> str:
        return f"$O.{self._spec.name}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _digest(data: bytes) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()}"
