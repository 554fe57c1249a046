"""A line of a job goes the very way of an online request: into the application's routes, in process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import cast

import msgspec
from litestar.types import ASGIApp, HTTPReceiveMessage, HTTPScope, Message

from fleet_ingress.api.errors import ErrorBody, ErrorEnvelope
from fleet_ingress.context import TENANT_KEY
from fleet_ingress.core.job_state import Answer
from fleet_ingress.errors import INVALID_REQUEST, SERVER
from fleet_ingress.jobs.origin import JobOrigin, as_job
from fleet_ingress.routes.http import CLOSE_KEY

#: Routes whose requests can be lines of a job: JSON in, one whole answer out. Served are those the application has.
JOB_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/audio/speech",
)


class _Streamed(msgspec.Struct):
    """The one field that cannot mean in a job what it means online."""

    stream: bool | None = None


_decode_streamed = msgspec.json.Decoder(_Streamed).decode
_NO_STREAM = ErrorEnvelope(
    error=ErrorBody(
        message="A job has nobody to stream to: leave `stream` out.",
        type=INVALID_REQUEST,
        param="stream",
        code="unsupported_in_job",
    )
)


_NOT_WHOLE = ErrorEnvelope(
    error=ErrorBody(message="The answer broke off; ask again.", type=SERVER, code="stream_incomplete")
)


class InProcess:
    """Calls routes of an application without a connection."""

    def __init__(self, app: ASGIApp, served: Collection[str], origin: JobOrigin) -> None:
        """
        Args:
            served: paths of the application's routes.
        """
        self._app = app
        self._origin = origin
        self.endpoints = tuple(path for path in JOB_ENDPOINTS if path in served)

    async def post(self, path: str, body: bytes, tenant: str) -> Answer:
        """The answer a client of that tenant would get. Cancelled: as when the client leaves."""
        if _is_streamed(body):
            return Answer(400, msgspec.json.encode(_NO_STREAM))
        call = _Call(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "extensions": {},
            "state": {TENANT_KEY: tenant, CLOSE_KEY: call.break_off},
        }
        with as_job(self._origin):
            await self._app(cast("HTTPScope", scope), call.receive, call.send)
        return call.answer()


def _is_streamed(body: bytes) -> bool:
    try:
        return bool(_decode_streamed(body).stream)
    except msgspec.DecodeError:
        # What is wrong with it, the route says.
        return False


class _Call:
    """One exchange: the body once, then nothing; what is sent is kept."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._answer = bytearray()
        self._is_whole = False
        self._is_broken = False

    async def receive(self) -> HTTPReceiveMessage:
        if self._request is None:
            # Nobody can leave: whoever waits for it waits until the exchange is over.
            await asyncio.Event().wait()
        body, self._request = self._request or b"", None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.lower(): value for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self._answer += message["body"]
            self._is_whole = not message["more_body"]

    def break_off(self) -> None:
        """What was sent is not a whole answer: a connection would be closed now."""
        self._is_broken = True

    def answer(self) -> Answer:
        """What was sent; a fault when that is only part of an answer."""
        if self._is_broken or not self._is_whole:
            return Answer(500, msgspec.json.encode(_NOT_WHOLE))
        retry_after = self._headers.get(b"retry-after", b"").decode("latin-1")
        return Answer(
            status=self._status,
            body=bytes(self._answer),
            content_type=self._headers.get(b"content-type", b"application/json").decode("latin-1"),
            request_id=self._headers.get(b"x-fleet-request-id", b"").decode("latin-1"),
            retry_after_s=float(retry_after) if retry_after.isdigit() else None,
        )
