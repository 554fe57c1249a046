"""REQUIREMENTS F1, the store: wiped at any moment, again and again, no request waits for its deadline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from fleet_cli.testing import RunningFleet, running_fleet
from tests.support.load import bodies
from tests.support.stack import flush_store

pytestmark = pytest.mark.e2e

NUM_ROUNDS, NUM_FLUSHES = 4, 8
#: Requests that wait for decode while the store is wiped have embeddings, pixels and root to lose.
SETTINGS = {
    "FLEET_ENGINE": "scripted",
    "FLEET_VISION_REPLICAS": "2",
    "FLEET_INGRESS_MAX_RESUBMISSIONS": str(NUM_FLUSHES),
    "FLEET_DECODE_SLOTS": "2",
    "FLEET_DECODE_ENGINE_ARGS": '{"token_delay_s": 0.05, "hidden_size": 64, "image_tokens": 16}',
    "FLEET_PREPROCESS_ENGINE_ARGS": '{"image_side_px": 64, "image_tokens": 16}',
    "FLEET_VISION_ENGINE_ARGS": '{"hidden_size": 64, "image_tokens": 16}',
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("flushed"), SETTINGS, timeout_s=60.0) as running:
        running.wait_workers("vision_encode", 2, 30.0)
        yield running


async def test_no_request_is_lost_however_often_the_store_is_wiped(fleet: RunningFleet) -> None:
    rng = random.Random(7)
    requests = bodies("omnifleet-vlm", 8, pictures=True)
    statuses: list[int] = []
    num_repeated = 0
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as client:
        for _ in range(NUM_ROUNDS):
            asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in requests]
            for _ in range(NUM_FLUSHES):
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await asyncio.to_thread(flush_store, fleet)
            answers = await asyncio.gather(*asked)
            statuses += [answer.status_code for answer in answers]
            ids = [answer.json()["id"] for answer in answers if answer.status_code == 200]
            reports = [(await client.get(f"/v1/requests/{one}")).json() for one in ids]
            num_repeated += sum(report["num_resubmissions"] > 1 for report in reports)

    print(f"{len(statuses)} requests, {num_repeated} resubmitted more than once, {statuses.count(503)} given up")
    assert set(statuses) == {200}
    assert num_repeated > 0, "the store was wiped at the wrong moments"
