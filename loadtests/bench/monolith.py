"""The fleet beside vLLM's own OpenAI server: same model, cores and threads; the two take turns in one run."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import httpx

from fleet_cli.testing import running_fleet
from fleet_cli.up.settings import UpSettings
from fleet_models import prepare
from loadtests.bench.client import Timed, at_concurrency, median, stream_chat
from loadtests.bench.figure import Figure
from loadtests.bench.vllm_server import monolith

THREADS = 1
SLOTS = 16
NUM_TTFT = 15
NUM_THROUGHPUT_ROUNDS = 3
TOKENS = 32


def _body(model: str, prompt: str, max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


async def _ttft(ours: httpx.AsyncClient, theirs: httpx.AsyncClient, names: tuple[str, str]) -> tuple[float, float]:
    """Medians of time to first token in seconds, requests alternating between the servers."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(NUM_TTFT + 2):
        for kept, client, name in zip(times, (ours, theirs), names, strict=True):
            # A new prompt each time, or the prefix cache would answer.
            timed = await stream_chat(client, _body(name, f"Tell me fact number {index} about whales.", 4))
            if index >= 2:
                kept.append(timed.ttft_s)
    return median(times[0]), median(times[1])


async def _throughput(client: httpx.AsyncClient, name: str, round_: int) -> float:
    """Output tokens per second of 32 requests at concurrency 16."""
    bodies = [_body(name, f"Round {round_}, story {index}: tell it.", TOKENS) for index in range(SLOTS * 2)]
    answers, wall_s = await at_concurrency(client, bodies, SLOTS)
    return _tokens(answers) / wall_s


def _tokens(answers: list[Timed]) -> int:
    return sum(answer.num_tokens for answer in answers)


async def _measure(our_url: str, their_url: str, names: tuple[str, str]) -> list[Figure]:
    limits = httpx.Limits(max_connections=64)
    async with (
        httpx.AsyncClient(base_url=our_url, timeout=300, limits=limits) as ours,
        httpx.AsyncClient(base_url=their_url, timeout=300, limits=limits) as theirs,
    ):
        ours_s, theirs_s = await _ttft(ours, theirs, names)
        rates: tuple[list[float], list[float]] = ([], [])
        for round_ in range(NUM_THROUGHPUT_ROUNDS):
            for kept, client, name in zip(rates, (ours, theirs), names, strict=True):
                kept.append(await _throughput(client, name, round_))
    our_rate, their_rate = median(rates[0]), median(rates[1])
    return [
        Figure("ttft_text_p50", ours_s * 1e3, "ms", theirs_s * 1e3, ours_s / theirs_s, "beside vLLM's own server"),
        Figure("throughput_c16", our_rate, "tokens/s", their_rate, our_rate / their_rate, "beside vLLM's own server"),
    ]


def figures() -> list[Figure]:
    """`ttft_text_p50`, `throughput_c16`, `second_start`."""
    with tempfile.TemporaryDirectory() as folder:
        model_path = prepare("smollm2-135m-instruct", UpSettings().model_cache.expanduser(), print)
        settings = {
            "FLEET_CHAT_MODEL": str(model_path),
            "FLEET_EMBEDDING_MODEL": "",
            "FLEET_DECODE_SLOTS": str(SLOTS),
            "FLEET_DECODE_THREADS": str(THREADS),
        }
        with (
            monolith(model_path, threads=THREADS, max_num_seqs=SLOTS, log=Path(folder) / "vllm.log") as server,
            running_fleet(Path(folder) / "fleet", settings) as fleet,
        ):
            ours = httpx.get(f"{fleet.url}/v1/models", timeout=10).json()["data"][0]["id"]
            start = Figure(
                "second_start",
                fleet.start_s,
                "s",
                server.start_s,
                fleet.start_s / server.start_s,
                "fleet up with models prepared, beside vLLM's own server; allowed: + 15 s",
            )
            return [start, *asyncio.run(_measure(fleet.url, server.url, (ours, server.model)))]
