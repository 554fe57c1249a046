"""Is a process ready? One HTTP GET or one TCP connect."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

_TIMEOUT_S = 2.0
_LIMIT_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process says of itself; `reason` only when it is not ready."""

    is_ready: bool
    reason: str = ""


async def listens(port: int) -> bool:
    """Whether something accepts connections on a loopback port."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def ask_ready(url: str) -> Answer:
    """GET a readiness URL: 200 is ready, any other answer says why not, no answer is "starting"."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status, body = await _get(url)
    except (OSError, TimeoutError, ValueError):
        return Answer(is_ready=False)
    return Answer(is_ready=status == 200, reason="" if status == 200 else reason_in(body))


def reason_in(body: str) -> str:
    """The sentence in an answer: plain text, or the message of an OpenAI error envelope."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return body.strip()[:120]


async def _get(url: str) -> tuple[int, str]:
    """Status and body. Raises OSError, ValueError for what is no HTTP."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        answer = (await reader.read(_LIMIT_BYTES)).decode(errors="replace")
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ", 2)[1]) if head.startswith("HTTP/") else 0, body
