"""What a worker reports of itself."""

from __future__ import annotations

import pytest

from fleet_common.errors import EngineError, FleetError, InvalidInputError
from fleet_common.stage.port import Product, StepItem
from fleet_common.stage.stats import WorkerStats
from fleet_common.testing.engines import ScriptedBatchEngine, default_product
from fleet_common.testing.plans import chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts.base import Stage


def test_busy_time_and_utilisation_follow_what_runs() -> None:
    stats = WorkerStats(slots=4, now_s=100.0)

    stats.started(2, 101.0)
    stats.stopped(2, 3.0, 104.0)

    assert stats.busy_s_total(110.0) == 3.0
    assert pytest.approx(6 / 40) == stats.utilisation_ratio(110.0)
    assert stats.utilisation_ratio(111.0) == 0.0
    assert stats.service_s == 3.0


def test_means_follow_the_newest_values() -> None:
    stats = WorkerStats(slots=1, now_s=0.0)
    for _ in range(30):
        stats.waited(1.0)
    for _ in range(30):
        stats.waited(2.0)

    assert pytest.approx(2.0, abs=0.01) == stats.queue_wait_s


async def test_only_the_workers_own_faults_count_as_failed(rig: Rig) -> None:
    answers: list[Product | FleetError] = [InvalidInputError("bad"), EngineError("x"), EngineError("x")]

    def behave(item: StepItem) -> Product | FleetError:
        return answers.pop(0) if answers else default_product(item)

    worker = await rig.worker(Stage.PREPROCESS, ScriptedBatchEngine(behave, max_batch=1), slots=1)
    for _ in range(3):
        await rig.submit(chat_task(now_unix_s=rig.clock.unix_s()))
        await rig.clock.advance(1.0)

    assert (worker.stats.completed_total, worker.stats.failed_total) == (2, 1)
