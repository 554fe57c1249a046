"""The small HTTP endpoint of processes that serve no API: `/health/live`, `/health/ready`, `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_REQUEST_LIMIT_BYTES = 8192
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a process can take work; `reason` says why not."""

    is_ready: bool
    reason: str = ""


class HealthServer:
    """Answers GET on one port; everything else is 404. Small enough to need no framework in a worker."""

    def __init__(self, registry: CollectorRegistry, readiness: Callable[[], Readiness]) -> None:
        self._registry = registry
        self._readiness = readiness
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (the one chosen when `port` is 0)."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_LIMIT_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status, content_type, body = self._answer(head)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            # A peer that sends garbage or nothing gets no answer: there is no request to answer.
            writer.transport.abort()
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[str, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        path = words[1].partition(b"?")[0] if len(words) == 3 and words[0] == b"GET" else b""
        if path == b"/health/live":
            return "200 OK", "text/plain", b"live\n"
        if path == b"/health/ready":
            readiness = self._readiness()
            if readiness.is_ready:
                return "200 OK", "text/plain", b"ready\n"
            return "503 Service Unavailable", "text/plain", readiness.reason.encode() + b"\n"
        if path == b"/metrics":
            return "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        return "404 Not Found", "text/plain", b"not found\n"
