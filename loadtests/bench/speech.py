"""Speech from a real model through a whole fleet: when the first sound comes, beside when the last one does."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import httpx

from fleet_cli.testing import RunningFleet, running_fleet, wait_for
from loadtests.bench.client import median
from loadtests.bench.figure import Figure

MODEL = "hibari"
#: Four sentences.
TEXT = (
    "The ship sailed across the bay at noon. My brother bought fresh bread and butter this morning. "
    "A small dog ran behind the old wooden fence. Please close the window before it starts to rain."
)
NUM_RUNS = 20
#: Nobody chats: the chat model's workers cost nothing.
_SETTINGS = {
    "FLEET_VISION_ENGINE": "scripted",
    "FLEET_DECODE_ENGINE": "scripted",
    "FLEET_DECODE_ENGINE_ARGS": '{"hidden_size": 576, "image_tokens": 16}',
    "FLEET_SPEECH_MODEL": MODEL,
}


async def _one(client: httpx.AsyncClient, text: str) -> tuple[float, float, int]:
    """Seconds to the first sound and to the last, and bytes of samples."""
    started_s = time.perf_counter()
    first_s, num_bytes = 0.0, 0
    body = {"model": MODEL, "input": text, "response_format": "pcm"}
    async with client.stream("POST", "/v1/audio/speech", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for piece in answer.aiter_raw():
            first_s = first_s or time.perf_counter() - started_s
            num_bytes += len(piece)
    return first_s, time.perf_counter() - started_s, num_bytes


async def _measure(url: str) -> list[Figure]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await _one(client, TEXT)
        runs = [await _one(client, TEXT) for _ in range(NUM_RUNS)]
    first_s, whole_s = median([run[0] for run in runs]), median([run[1] for run in runs])
    speech_s = runs[0][2] / 2 / 24_000
    return [
        Figure(
            "speech_first_chunk_p50",
            first_s * 1e3,
            "ms",
            reference=whole_s * 1e3,
            ratio=first_s / whole_s,
            note="four sentences, beside the whole of them; below 0.5 is wanted",
        ),
        Figure("speech_realtime_ratio", speech_s / whole_s, "s/s", note=f"{speech_s:.1f} s of speech, one worker"),
    ]


def measure(fleet: RunningFleet) -> list[Figure]:
    """The figures of a fleet that runs already."""

    def speaks() -> bool:
        cards = httpx.get(f"{fleet.url}/v1/models", timeout=10).json()["data"]
        return any(card["id"] == MODEL and card["state"] == "ready" for card in cards)

    wait_for(speaks, 120.0, "the model that speaks")
    return asyncio.run(_measure(fleet.url))


def figures() -> list[Figure]:
    """`speech_first_chunk_p50` and how fast speech is made."""
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder) / "fleet", _SETTINGS) as fleet:
        return measure(fleet)
