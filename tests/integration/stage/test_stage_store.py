"""The tensor store goes away, or comes back empty, under worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fleet_common.testing.servers import ServerProcess, valkey_server
from fleet_contracts.base import Stage

from .conftest import Fleet, eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def valkey() -> Iterator[ServerProcess]:
    with valkey_server() as server:
        yield server


def store_environment(server: ServerProcess) -> dict[str, str]:
    """Everything above 64 bytes goes to Redis."""
    return {
        "FLEET_STORE__ARENA_BYTES": "0",
        "FLEET_STORE__REDIS_URL": server.url,
        "FLEET_STORE__REDIS_TIMEOUT_S": "1",
        "FLEET_STORE__SHM_THRESHOLD_BYTES": "64",
    }


async def test_flushed_store_is_filled_again_from_the_start_of_the_plan(fleet: Fleet, valkey: ServerProcess) -> None:
    fleet.environment = store_environment(valkey)
    pre, vision = await asyncio.gather(
        fleet.worker(Stage.PREPROCESS, "p0"), fleet.worker(Stage.VISION_ENCODE, "v0", max_batch=2)
    )
    tasks = [await fleet.submit(num_images=1 + n % 2) for n in range(6)]
    await eventually(lambda: len(vision.steps()) == 9)

    # It keeps nothing on disk: a restart is a flush.
    await asyncio.to_thread(valkey.restart)
    await fleet.worker(Stage.DECODE, "d0")
    await fleet.all_ended(tasks)

    assert len(pre.steps()) > 6
    for task in tasks:
        view = fleet.ingress.view(task.request_id)
        assert view.tokens == list(range(20))
        assert len(view.terminal) == 1


async def test_store_out_of_reach_pauses_the_worker_and_costs_no_delivery(fleet: Fleet, valkey: ServerProcess) -> None:
    fleet.environment = store_environment(valkey)
    pre = await fleet.worker(Stage.PREPROCESS, "p0")
    await asyncio.gather(fleet.worker(Stage.VISION_ENCODE, "v0"), fleet.worker(Stage.DECODE, "d0"))
    await asyncio.to_thread(valkey.kill)
    tasks = [await fleet.submit(num_images=1) for _ in range(3)]
    await eventually(lambda: any(line["event"] == "dependency_lost" for line in pre.log))
    await asyncio.sleep(2.5)
    states = {info.worker_id: info.state for info in await fleet.infos()}

    await asyncio.to_thread(valkey.start)
    await fleet.all_ended(tasks)

    assert states["p0"] == "paused"
    assert {line["delivery"] for line in pre.steps()} == {1}
