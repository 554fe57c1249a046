"""Worker processes on a real broker: the journey, a drain, a death, a freeze, a broker that restarts."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from fleet_common.bus.port import DeadDelivery
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage
from fleet_contracts.events import Finished
from fleet_contracts.work import Cancel

from .conftest import Fleet, eventually

pytestmark = pytest.mark.integration


async def test_requests_run_through_three_processes(fleet: Fleet) -> None:
    workers = await asyncio.gather(
        fleet.worker(Stage.PREPROCESS, "p0"),
        fleet.worker(Stage.VISION_ENCODE, "v0"),
        fleet.worker(Stage.DECODE, "d0"),
    )

    tasks = [await fleet.submit(num_images=n % 3) for n in range(9)]
    await fleet.all_ended(tasks)
    infos = await fleet.infos()

    for task in tasks:
        view = fleet.ingress.view(task.request_id)
        assert list(range(20)) == view.tokens
        assert [Finished] == [type(event) for event in view.terminal]
    assert {"p0", "v0", "d0"} == {info.worker_id for info in infos}
    assert {"ready"} == {info.state for info in infos}
    assert len(workers[0].steps()) == 9


async def test_killed_decode_worker_is_continued_by_another(fleet: Fleet) -> None:
    await fleet.worker(Stage.PREPROCESS, "p0")
    first = await fleet.worker(Stage.DECODE, "d0", token_s=0.1)
    tasks = [await fleet.submit() for _ in range(4)]
    views = [fleet.ingress.view(task.request_id) for task in tasks]
    await eventually(lambda: all(len(view.tokens) >= 3 for view in views))

    first.signal(signal.SIGKILL)
    killed_s = time.monotonic()
    await fleet.worker(Stage.DECODE, "d1", token_s=0.01)
    await fleet.all_ended(tasks)

    assert time.monotonic() - killed_s < 15
    for view in views:
        assert list(range(20)) == view.tokens
        assert len(view.terminal) == 1
        assert len(view.claims) >= 1


async def test_killed_vision_worker_loses_no_picture(fleet: Fleet) -> None:
    await fleet.worker(Stage.PREPROCESS, "p0")
    await fleet.worker(Stage.DECODE, "d0")
    first = await fleet.worker(Stage.VISION_ENCODE, "v0", batch_s=30)
    tasks = [await fleet.submit(num_images=2) for _ in range(3)]
    await eventually(lambda: sum(line["outcome"] == "ok" for line in fleet.workers[0].steps()) == 3)

    first.signal(signal.SIGKILL)
    await fleet.worker(Stage.VISION_ENCODE, "v1")
    await fleet.all_ended(tasks)

    for task in tasks:
        assert len(fleet.ingress.view(task.request_id).terminal) == 1


async def test_frozen_worker_is_replaced_and_what_it_says_later_is_dropped(fleet: Fleet) -> None:
    await fleet.worker(Stage.PREPROCESS, "p0")
    frozen = await fleet.worker(Stage.DECODE, "d0", token_s=0.1)
    tasks = [await fleet.submit() for _ in range(3)]
    views = [fleet.ingress.view(task.request_id) for task in tasks]
    await eventually(lambda: all(len(view.tokens) >= 3 for view in views))

    frozen.signal(signal.SIGSTOP)
    await fleet.worker(Stage.DECODE, "d1", token_s=0.15)
    await eventually(lambda: all(view.claims for view in views))
    frozen.signal(signal.SIGCONT)
    await fleet.all_ended(tasks)
    await eventually(lambda: any(line["event"] == "worker_was_frozen" for line in frozen.log))

    for view in views:
        assert list(range(20)) == view.tokens
        assert [event.attempt.worker_id for event in view.terminal] == ["d1"]


async def test_broker_killed_under_load_finishes_everything_exactly_once(fleet: Fleet) -> None:
    await asyncio.gather(
        fleet.worker(Stage.PREPROCESS, "p0", batch_s=0.2, max_batch=2, slots=4),
        fleet.worker(Stage.VISION_ENCODE, "v0", batch_s=0.2, max_batch=2),
        fleet.worker(Stage.DECODE, "d0", token_s=0.05),
    )
    tasks = [await fleet.submit(num_images=n % 2) for n in range(20)]
    await eventually(lambda: any(view.tokens for view in fleet.ingress.requests.values()))

    await asyncio.to_thread(fleet.server.kill)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(fleet.server.start)
    await fleet.all_ended(tasks, timeout_s=30.0)

    for task in tasks:
        view = fleet.ingress.view(task.request_id)
        assert list(range(20)) == view.tokens
        assert [Finished] == [type(event) for event in view.terminal]


async def test_poison_kills_solo_until_the_broker_gives_up(fleet: Fleet) -> None:
    advisories: list[int] = []

    async def note(dead: DeadDelivery) -> None:
        advisories.append(dead.num_delivered)
        await dead.settle()

    watch = await fleet.bus.max_deliveries(note)
    await fleet.submit(suffix="die-pre")
    worker = await fleet.worker(Stage.PREPROCESS, "p0", wait=False)
    deaths = 0
    until_s = time.monotonic() + 60
    while not advisories and time.monotonic() < until_s:
        if worker.process.poll() is not None:
            deaths += 1
            worker = await fleet.worker(Stage.PREPROCESS, "p0", wait=False)
        await asyncio.sleep(0.1)
    good = await fleet.submit()
    await fleet.worker(Stage.DECODE, "d0")
    await fleet.all_ended([good])
    await watch.stop()

    # Once in company (published again as solo by the second delivery, which ends nobody), then five times alone.
    assert advisories == [5]
    assert deaths == 6


async def test_sigterm_drains_and_gives_the_rest_to_others(fleet: Fleet) -> None:
    leaving = await fleet.worker(Stage.PREPROCESS, "p0", batch_s=1.0, max_batch=1, slots=1)
    tasks = [await fleet.submit() for _ in range(3)]
    await asyncio.sleep(0.3)

    leaving.signal(signal.SIGTERM)
    left_s = time.monotonic()
    await asyncio.to_thread(leaving.process.wait, 10)
    took_s = time.monotonic() - left_s
    infos = await fleet.infos()
    await fleet.worker(Stage.PREPROCESS, "p1")
    await fleet.worker(Stage.DECODE, "d0")
    await fleet.all_ended(tasks)

    assert leaving.process.returncode == 0
    assert took_s < 8
    assert [info.worker_id for info in infos] == []
    outcomes = [line["outcome"] for line in leaving.steps()]
    assert outcomes.count("ok") == 1
    assert set(outcomes) == {"ok", "drained"}


async def test_cancel_stops_a_stream_and_settles_it(fleet: Fleet) -> None:
    await fleet.worker(Stage.PREPROCESS, "p0")
    decode = await fleet.worker(Stage.DECODE, "d0", token_s=0.5)
    task = await fleet.submit()
    view = fleet.ingress.view(task.request_id)
    await eventually(lambda: len(view.tokens) >= 1)

    cancel = Cancel(request_id=task.request_id, reason="client left", deadline_unix_s=task.deadline_unix_s)
    await fleet.bus.publish(subjects.CANCEL, codec.encode(cancel))

    await eventually(lambda: [line["outcome"] for line in decode.steps()] == ["cancelled"], 3.0)
    assert view.terminal == []
    backlog = await fleet.bus.pool_pending()
    assert sum(one.num_pending + one.num_ack_pending for one in backlog) == 0


async def test_worker_refuses_another_topology(fleet: Fleet) -> None:
    worker = await fleet.worker(Stage.PREPROCESS, "p0", wait=False, pool="not-declared")

    status = await asyncio.to_thread(worker.process.wait, 20)

    assert status == 1
    assert any("fleet bus apply" in str(line.get("reasons")) for line in worker.log)


async def test_second_signal_ends_at_once_and_others_take_over(fleet: Fleet) -> None:
    hanging = await fleet.worker(Stage.PREPROCESS, "p0", batch_s=60)
    task = await fleet.submit()
    await eventually(lambda: bool(fleet.ingress.view(task.request_id).steps))

    hanging.signal(signal.SIGTERM)
    await eventually(lambda: any(line["event"] == "drain_started" for line in hanging.log))
    await asyncio.sleep(1.2)
    hanging.signal(signal.SIGTERM)
    left_s = time.monotonic()
    await asyncio.to_thread(hanging.process.wait, 10)
    took_s = time.monotonic() - left_s
    await fleet.worker(Stage.PREPROCESS, "p1")
    await fleet.worker(Stage.DECODE, "d0")
    await fleet.all_ended([task])

    assert took_s < 2
    assert hanging.process.returncode == 0


async def test_worker_told_to_stop_while_it_loads_leaves_no_lease(fleet: Fleet) -> None:
    loading = await fleet.worker(Stage.PREPROCESS, "p0", wait=False, load_s=60)
    await eventually(lambda: any(line["event"] == "worker_lease_taken" for line in loading.log))
    states = [info.state for info in await fleet.infos()]

    loading.signal(signal.SIGTERM)
    await asyncio.to_thread(loading.process.wait, 10)

    assert states == ["starting"]
    assert loading.process.returncode == 0
    assert await fleet.infos() == []


async def test_lease_is_written_again_after_the_broker_lost_it(fleet: Fleet) -> None:
    await fleet.worker(Stage.PREPROCESS, "p0")

    await asyncio.to_thread(fleet.server.kill)
    await asyncio.sleep(5.0)
    await asyncio.to_thread(fleet.server.start)
    await eventually(lambda: fleet.bus.is_connected)
    await asyncio.sleep(2.0)

    assert [info.state for info in await fleet.infos()] == ["ready"]


async def test_worker_whose_engine_died_ends_with_status_one_and_loses_nothing(fleet: Fleet) -> None:
    await fleet.worker(Stage.PREPROCESS, "p0")
    dying = await fleet.worker(Stage.DECODE, "d0", token_s=0.05)
    tasks = [await fleet.submit() for _ in range(3)]
    await eventually(lambda: any(view.tokens for view in fleet.ingress.requests.values()))
    tasks.append(await fleet.submit(suffix="dead-dec"))

    status = await asyncio.to_thread(dying.process.wait, 10)
    await fleet.worker(Stage.DECODE, "d1")
    await fleet.all_ended(tasks)

    assert status == 1
    for task in tasks:
        assert fleet.ingress.view(task.request_id).tokens == list(range(20))
