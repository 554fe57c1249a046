"""The parts of HTTP the routes share: reading a body under a limit, sending answers."""

from __future__ import annotations

import asyncio

from litestar.types import HTTPScope, Receive, Send

from fleet_ingress.errors import ApiError, by_status

#: Key in an ASGI scope's state under which our server leaves a function that closes the connection after the answer.
CLOSE_KEY = "fleet_close"

#: After a refusal, this much of an oversized body is read and thrown away, so that the client gets to see the answer.
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0


class BodyRefusedError(ApiError):
    """413 or 408: the answer leaves before the body was read to its end, unless it `is_read`."""

    def __init__(self, error: ApiError, *, is_read: bool = False) -> None:
        super().__init__(error.status, error.body)
        self.is_read = is_read


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


def header(scope: HTTPScope, name: bytes) -> str | None:
    """Value of a header (`name` in lower case), None when absent."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def announced_bytes(scope: HTTPScope, limit_bytes: int) -> int:
    """Content-Length, or the limit for a body that comes in chunks. Raises ApiError (413, 400)."""
    text = header(scope, b"content-length")
    if text is None:
        return limit_bytes
    if not text.isdigit():
        raise by_status(400, "Content-Length is no number.")
    if int(text) > limit_bytes:
        raise BodyRefusedError(_too_large(limit_bytes))
    return int(text)


def check_content_type(scope: HTTPScope) -> None:
    """Only plain JSON is taken. Raises ApiError (415)."""
    media_type = (header(scope, b"content-type") or "application/json").partition(";")[0].strip().lower()
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if media_type != "application/json" or encoding != "identity":
        raise by_status(415)


async def read_body(receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError (413 as soon as the limit is passed, 408), ClientGoneError."""
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                num_bytes += len(message["body"])
                if num_bytes > limit_bytes:
                    raise BodyRefusedError(_too_large(limit_bytes), is_read=not message["more_body"])
                chunks.append(message["body"])
                if not message["more_body"]:
                    return b"".join(chunks)
    except TimeoutError as err:
        raise BodyRefusedError(by_status(408)) from err


async def send_json(send: Send, body: bytes, headers: list[tuple[bytes, bytes]], status: int = 200) -> None:
    """A whole answer."""
    await _start(send, status, [(b"content-type", b"application/json"), *headers], len(body))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(
    scope: HTTPScope, receive: Receive, send: Send, error: ApiError, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """An error answer. After 413 and 408 the rest of the body is thrown away, so that the connection can go on.

    What is larger than a bound, or slow, is not waited for: the connection closes.
    """
    body = error.envelope
    await _start(send, error.status, [*error.headers(), *(headers or [])], len(body))
    if isinstance(error, BodyRefusedError) and not error.is_read:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if not await _discard(receive):
            close_after_answer(scope)
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


def close_after_answer(scope: HTTPScope) -> None:
    """Have the server close the connection once the answer is out; other servers than ours keep it open."""
    close = scope["state"].get(CLOSE_KEY)
    if close is not None:
        close()


def _too_large(limit_bytes: int) -> ApiError:
    return by_status(413, f"The request body is larger than {limit_bytes} bytes.")


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]], num_bytes: int) -> None:
    length = (b"content-length", str(num_bytes).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})


async def _discard(receive: Receive) -> bool:
    """Read the rest of a body for nothing; False when there was too much of it."""
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while num_bytes < _DISCARD_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message["more_body"]:
                    return True
                num_bytes += len(message["body"])
    except TimeoutError:
        return False
    return False
