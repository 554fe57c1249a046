"""Case C14: the store holds four of sixteen pictures, and is emptied in the middle; no answer is another picture's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from PIL import Image

from fleet_cli.testing import RunningFleet, running_fleet
from tests.support.pipeline import png_url
from tests.support.stack import network_store

pytestmark = pytest.mark.e2e

NUM_PICTURES, NUM_REQUESTS, CONCURRENCY = 16, 64, 16
IMAGE_TOKENS, HIDDEN_SIZE, SIDE_PX = 64, 576, 224
EMBEDDINGS_BYTES = IMAGE_TOKENS * HIDDEN_SIZE * 4
PIXELS_BYTES = 3 * SIDE_PX * SIDE_PX


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Scripted answers follow from prompt and embeddings; tensors travel through Redis alone."""
    settings = {
        "FLEET_ENGINE": "scripted",
        "FLEET_STORE__ARENA_BYTES": "0",
        "FLEET_VISION_REPLICAS": "2",
        "FLEET_VISION_CACHE_BYTES": str(4 * EMBEDDINGS_BYTES),
        "FLEET_PREPROCESS_ENGINE_ARGS": f'{{"image_side_px": {SIDE_PX}, "image_tokens": {IMAGE_TOKENS}}}',
        "FLEET_VISION_ENGINE_ARGS": f'{{"image_tokens": {IMAGE_TOKENS}, "hidden_size": {HIDDEN_SIZE}}}',
        "FLEET_DECODE_ENGINE_ARGS": f'{{"hidden_size": {HIDDEN_SIZE}, "image_tokens": {IMAGE_TOKENS}}}',
    }
    with running_fleet(tmp_path_factory.mktemp("fleet"), settings, timeout_s=90.0) as running:
        running.wait_workers("vision_encode", 2)
        yield running


def picture_urls() -> list[str]:
    made = []
    for seed in range(NUM_PICTURES):
        blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        made.append(png_url(Image.fromarray(blocks).resize((64, 64), Image.Resampling.NEAREST)))
    return made


async def ask(client: httpx.AsyncClient, url: str) -> tuple[str, str]:
    """Answer and request id."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"model": "omnifleet-vlm", "messages": [{"role": "user", "content": parts}], "max_tokens": 12}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"]), str(answer.json()["id"])


async def num_repaired(client: httpx.AsyncClient, request_ids: list[str]) -> int:
    """How many requests had a step made again because what it had made was gone."""
    reports = [(await client.get(f"/v1/requests/{request_id}")).json() for request_id in request_ids]
    return sum(any(step["epoch"] > 0 for step in report["steps"]) for report in reports)


async def test_no_process_dies_and_every_answer_belongs_to_its_picture(fleet: RunningFleet) -> None:
    urls = picture_urls()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=90) as client:
        expected = [(await ask(client, url))[0] for url in urls]
        order = [index % NUM_PICTURES for index in range(NUM_REQUESTS)]
        random.Random(14).shuffle(order)
        pids = {name: entry["pid"] for name, entry in fleet.stack()["processes"].items()}

        with network_store(fleet) as store:
            store.flushall()
            used = int(store.info("memory")["used_memory"])
            store.config_set("maxmemory", used + 4 * (EMBEDDINGS_BYTES + PIXELS_BYTES))
            gate = asyncio.Semaphore(CONCURRENCY)
            num_done = 0

            async def one(index: int) -> tuple[str, str]:
                nonlocal num_done
                async with gate:
                    answer = await ask(client, urls[index])
                num_done += 1
                if num_done == NUM_REQUESTS // 2:
                    await asyncio.to_thread(store.flushall)
                return answer

            answers = await asyncio.gather(*(one(index) for index in order))
            num_evicted = int(store.info("stats")["evicted_keys"])
        repaired = await num_repaired(client, [request_id for _, request_id in answers])

    assert len(set(expected)) == NUM_PICTURES
    assert [text for text, _ in answers] == [expected[index] for index in order]
    assert num_evicted > 0 and repaired > 0
    print(f"{num_evicted} tensors were evicted, {repaired} of {NUM_REQUESTS} requests had a step made again")
    assert {name: entry["pid"] for name, entry in fleet.stack()["processes"].items()} == pids
