"""The JetStream API over a connection: JSON requests, publish acknowledgements, direct reads of buckets."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from nats.aio.msg import Msg

from fleet_common.bus.connection import Connection
from fleet_common.errors import BusError, BusTimeoutError, NoResponderError

_API = "$JS.API"
_NOT_FOUND_CODES = (10037, 10059, 10014)  # message, stream, consumer
_PAGE_MSGS = 500


class JetStreamError(BusError):
    """The broker refused a JetStream request.

    Attributes:
        err_code: the broker's own code, 0 when unknown.
    """

    def __init__(self, what: str, description: str, err_code: int) -> None:
        super().__init__(f"{what}: {description} ({err_code})")
        self.description = description
        self.err_code = err_code

    @property
    def is_not_found(self) -> bool:
        """The stream, consumer or message does not exist."""
        return self.err_code in _NOT_FOUND_CODES


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct):
    """What the broker says of a stored message."""

    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None


_decode_ack = msgspec.json.Decoder(PubAck).decode


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message read from a stream. `headers` are those it was published with, and the broker's."""

    subject: str
    seq: int
    payload: bytes
    headers: Mapping[str, str]


async def api(connection: Connection, subject: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """Call `$JS.API.<subject>`. Raises JetStreamError for a refusal, BusError when there is no answer."""
    payload = b"" if body is None else msgspec.json.encode(body)
    message = await connection.request(f"{_API}.{subject}", payload, timeout_s)
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    if error := answer.get("error"):
        raise JetStreamError(subject, str(error.get("description", "")), int(error.get("err_code", 0)))
    return answer


async def api_pages(
    connection: Connection, subject: str, body: Mapping[str, Any], key: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Every element of a paged list."""
    found: list[dict[str, Any]] = []
    while True:
        answer = await api(connection, subject, {**body, "offset": len(found)}, timeout_s)
        page = answer.get(key) or []
        found.extend(page)
        if not page or len(found) >= int(answer.get("total", 0)):
            return found


async def publish(
    connection: Connection, subject: str, payload: bytes, headers: dict[str, str], timeout_s: float
) -> PubAck:
    """Store a message and wait for the acknowledgement. Raises JetStreamError, BusError."""
    return decode_ack(subject, await connection.request(subject, payload, timeout_s, headers))


def decode_ack(what: str, message: Msg) -> PubAck:
    """The acknowledgement of a publish. Raises JetStreamError when the broker refused it."""
    ack = _decode_ack(message.data)
    if ack.error is not None:
        raise JetStreamError(what, ack.error.description, ack.error.err_code)
    return ack


async def message_by_seq(connection: Connection, stream: str, seq: int, timeout_s: float) -> StoredMessage | None:
    """A message of a stream, None when it is gone."""
    try:
        answer = await api(connection, f"STREAM.MSG.GET.{stream}", {"seq": seq}, timeout_s)
    except JetStreamError as err:
        if err.is_not_found:
            return None
        raise
    stored = answer["message"]
    return StoredMessage(str(stored["subject"]), int(stored["seq"]), base64.b64decode(stored.get("data", "")), {})


async def last_by_subject(connection: Connection, stream: str, subject: str, timeout_s: float) -> StoredMessage | None:
    """The last message of one subject (direct get), None when there is none."""
    message, _ = await connection.request_again(f"{_API}.DIRECT.GET.{stream}.{subject}", b"", timeout_s)
    headers = message.headers or {}
    status = headers.get("Status")
    if status == "404":
        return None
    if status is not None:
        raise JetStreamError(stream, headers.get("Description", ""), int(status))
    return _stored(message)


async def read_bucket(
    connection: Connection, stream: str, subjects: str, timeout_s: float, page_msgs: int = _PAGE_MSGS
) -> list[StoredMessage]:
    """Every message of a stream on those subjects, oldest first, by pages of direct gets."""
    inbox = connection.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()

    async def on_message(message: Msg) -> None:
        arrived.put_nowait(message)

    subscription = await connection.subscribe(inbox, on_message)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_pages(connection, stream, {"batch": page_msgs, "next_by_subj": subjects}, inbox, arrived)
    except TimeoutError as err:
        raise BusTimeoutError(f"{stream}: not read within {timeout_s} s") from err
    finally:
        await connection.unsubscribe(subscription)


async def _read_pages(
    connection: Connection, stream: str, query: dict[str, Any], inbox: str, arrived: asyncio.Queue[Msg]
) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    next_seq = 1
    while True:
        page = msgspec.json.encode({**query, "seq": next_seq})
        await connection.publish(f"{_API}.DIRECT.GET.{stream}", page, reply=inbox)
        num_pending = await _read_page(stream, arrived, found)
        if num_pending == 0:
            return found
        next_seq = found[-1].seq + 1


async def _read_page(stream: str, arrived: asyncio.Queue[Msg], found: list[StoredMessage]) -> int:
    """Append a page; returns how many messages come after it."""
    num_before = len(found)
    while True:
        message = await arrived.get()
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            found.append(_stored(message))
        elif status == "404":
            return 0
        elif status == "204":
            return int(headers.get("Nats-Num-Pending", 0)) if len(found) > num_before else 0
        elif status == "503":
            raise NoResponderError(f"no stream {stream}: run `fleet bus apply`")
        else:
            raise JetStreamError(stream, headers.get("Description", ""), int(status))


def _stored(message: Msg) -> StoredMessage:
    headers = message.headers or {}
    return StoredMessage(headers["Nats-Subject"], int(headers["Nats-Sequence"]), message.data, headers)


async def purge(connection: Connection, stream: str, subjects: str, timeout_s: float) -> None:
    """Delete every message of a stream on those subjects."""
    await api(connection, f"STREAM.PURGE.{stream}", {"filter": subjects}, timeout_s)
