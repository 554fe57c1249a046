"""The HTTP server: uvicorn with limits on headers; signals and draining are the caller's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import TimerHandle
from collections.abc import Iterator
from typing import Any

import structlog
import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fleet_ingress.errors import by_status
from fleet_ingress.routes.http import CLOSE_KEY
from fleet_ingress.settings import IngressSettings

log = structlog.get_logger(__name__)

_MAX_HEADERS = 200
_KEEP_ALIVE_S = 30
_CLOSE_S = 2

#: After a refusal what the client still sends is thrown away for a while: closing at once would reset the connection
#: and take the answer with it.
_LINGER_S = 1.0
_LINGER_BYTES = 32 << 20


class _HeadersRefusedError(Exception):
    """The request's headers are over a limit."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on the size, the number and the arrival time of headers."""

    max_header_bytes: int
    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_headers = True
        self._received_bytes = 0
        self._parsed_bytes = 0
        self._refusal = 400
        self._is_refused = False
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._received_bytes += len(data)
            if self._received_bytes > _LINGER_BYTES:
                self.transport.close()
            return
        if self._is_in_headers:
            self._received_bytes += len(data)
        super().data_received(data)
        # A header without an end reaches no callback of the parser: count what came in.
        if self._is_in_headers and self._received_bytes > self.max_header_bytes and not self._is_refused:
            self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._parsed_bytes = 0
        self._wait_for_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._parsed_bytes += len(name) + len(value)
        if len(self.headers) > _MAX_HEADERS or self._parsed_bytes + len(self.url) > self.max_header_bytes:
            self._refusal = 431
            raise _HeadersRefusedError

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._received_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        cycle = self.cycle

        def close_after_answer() -> None:
            cycle.keep_alive = False

        state: dict[str, Any] = self.scope["state"]
        state[CLOSE_KEY] = close_after_answer

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _refuse(self, status: int) -> None:
        """Answer without the application, and close once the client has had a chance to read it."""
        self._is_refused = True
        body = by_status(status).envelope
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _wait_for_headers(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_timeout_s, self._on_header_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_header_timeout(self) -> None:
        if self.transport.is_closing() or self._is_refused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # Headers of a pipelined request: the answer before it must not be cut.
            self._wait_for_headers()
            return
        self._refuse(408)


class EdgeServer(uvicorn.Server):
    """A uvicorn server that leaves signals alone: the drain decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, settings: IngressSettings) -> EdgeServer:
    """A server for `app`; `await server.serve(sockets=[listen(settings)])`, `server.should_exit = True` to stop."""
    protocol = type(
        "ConfiguredProtocol",
        (LimitedProtocol,),
        {"max_header_bytes": settings.max_header_bytes, "header_timeout_s": settings.header_timeout_s},
    )
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    return EdgeServer(config)


def listen(settings: IngressSettings) -> socket.socket:
    """The listening socket. Raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in settings.http_host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only then: 40 ms per answer without uvloop.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.http_host, settings.http_port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
