"""A streaming OpenAI client that keeps times: the same code measures every server."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec


@dataclass(frozen=True, slots=True)
class Timed:
    """One streamed answer.

    Attributes:
        ttft_s: send to first content.
        total_s: send to end of stream.
        num_tokens: completion tokens by the server's own usage.
        longest_gap_s: longest wait between two content events.
    """

    ttft_s: float
    total_s: float
    num_tokens: int
    text: str
    longest_gap_s: float
    request_id: str


async def stream_chat(client: httpx.AsyncClient, body: dict[str, object]) -> Timed:
    """POST a chat completion with `stream` and usage; raises for anything but a complete answer."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started_s = previous_s = time.perf_counter()
    first_s, gap_s, num_tokens, text, request_id, is_done = 0.0, 0.0, 0, "", "", False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            payload = line[5:].strip()
            if payload == "[DONE]":
                is_done = True
                break
            chunk = msgspec.json.decode(payload)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            now_s = time.perf_counter()
            request_id = chunk["id"]
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content")
                if piece:
                    first_s = first_s or now_s
                    gap_s = max(gap_s, now_s - previous_s)
                    previous_s = now_s
                    text += piece
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    if not is_done:
        raise RuntimeError("the stream ended without [DONE]")
    return Timed(first_s - started_s, time.perf_counter() - started_s, num_tokens, text, gap_s, request_id)


async def at_concurrency(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, object]], concurrency: int
) -> tuple[list[Timed], float]:
    """Run all bodies, `concurrency` at once. Returns the answers and the wall seconds of the whole."""
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, object]) -> Timed:
        async with gate:
            return await stream_chat(client, body)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(body)) for body in bodies]
    return [task.result() for task in tasks], time.perf_counter() - started_s


def median(values: Sequence[float]) -> float:
    """Median; the figure to quote."""
    return statistics.median(values)
