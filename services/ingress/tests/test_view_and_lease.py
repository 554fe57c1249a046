"""What an ingress knows of the fleet, and how it stays known itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fleet_common.bus.memory import MemoryBroker
from fleet_common.testing.clock import ManualClock, settle
from fleet_contracts import codec, subjects
from fleet_contracts.base import Modality, Stage, WorkerId
from fleet_contracts.control import IngressInfo, ModelCard, PoolRoute, Route, RoutingTable, WorkerInfo
from fleet_ingress.core.catalog import Missing
from fleet_ingress.lease import hold_lease
from fleet_ingress.view import FleetView

_MODEL = "m"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> MemoryBroker:
    broker = MemoryBroker(clock)
    clock.on_move = broker.tick
    return broker


@pytest.fixture
async def view(broker: MemoryBroker) -> AsyncIterator[FleetView]:
    view = FleetView(broker.connect())
    await view.start()
    yield view
    await view.stop()


async def put_table(broker: MemoryBroker, *modalities: Modality, pools: tuple[str, ...] = ("a", "b")) -> None:
    routes = tuple(
        Route(
            stage=stage,
            model=_MODEL,
            pools=tuple(PoolRoute(pool=pool, weight_ratio=0.5, locality="here") for pool in pools),
        )
        for stage in Stage
    )
    card = ModelCard(model=_MODEL, input_modalities=(Modality.TEXT, *modalities))
    table = RoutingTable(revision=1, made_unix_s=0.0, policy="static", routes=routes, models=(card,))
    await (await broker.connect().kv(subjects.BUCKET_ROUTING)).put(subjects.ROUTING_KEY, codec.encode(table))
    await settle()


async def put_worker(broker: MemoryBroker, stage: Stage, pool: str, state: str = "ready") -> str:
    info = WorkerInfo(
        worker_id=WorkerId(f"w-{pool}"), stage=stage, pool=pool, host="h", pid=1, state=state, slots=1, locality="here"
    )
    key = f"worker.{stage.value}.w-{pool}"
    await (await broker.connect().kv(subjects.BUCKET_REGISTRY)).put(key, codec.encode(info), ttl_s=4.0)
    await settle()
    return key


async def test_stages_without_a_live_worker_are_missing(
    broker: MemoryBroker, clock: ManualClock, view: FleetView
) -> None:
    await put_table(broker, Modality.IMAGE)
    for stage in (Stage.PREPROCESS, Stage.VISION_ENCODE, Stage.DECODE):
        await put_worker(broker, stage, "a")
    whole = view.catalog.missing()
    await clock.advance(3.0)
    await put_worker(broker, Stage.DECODE, "a", state="draining")
    await put_worker(broker, Stage.PREPROCESS, "a")
    draining = view.catalog.missing()
    await clock.advance(3.0)
    expired = view.catalog.missing()

    assert whole == []
    assert draining == [Missing(_MODEL, Stage.DECODE)]
    assert expired == [Missing(_MODEL, Stage.VISION_ENCODE), Missing(_MODEL, Stage.DECODE)]


async def test_text_model_needs_no_vision(broker: MemoryBroker, view: FleetView) -> None:
    await put_table(broker)
    await put_worker(broker, Stage.PREPROCESS, "a")
    await put_worker(broker, Stage.DECODE, "a")

    assert view.catalog.missing() == []


async def test_new_work_goes_to_pools_with_live_workers(broker: MemoryBroker, view: FleetView) -> None:
    await put_table(broker)
    nowhere = view.catalog.pick(Stage.DECODE, _MODEL, 0.0)
    await put_worker(broker, Stage.DECODE, "b", state="paused")

    picked = [view.catalog.pick(Stage.DECODE, _MODEL, ratio) for ratio in (0.0, 0.4, 0.99)]

    assert nowhere is None
    assert [pool.pool for pool in picked if pool is not None] == ["b", "b", "b"]


async def test_a_stage_whose_engines_hang_takes_no_new_work(broker: MemoryBroker, view: FleetView) -> None:
    await put_table(broker)
    await put_worker(broker, Stage.DECODE, "b", state="stalled")

    assert view.catalog.pick(Stage.DECODE, _MODEL, 0.0) is None
    assert not view.catalog.has_worker(Stage.DECODE, _MODEL)


async def test_last_table_stays_in_force_and_garbage_changes_nothing(broker: MemoryBroker, view: FleetView) -> None:
    await put_table(broker)
    key = await put_worker(broker, Stage.DECODE, "a")
    bus = broker.connect()

    await (await bus.kv(subjects.BUCKET_ROUTING)).put(subjects.ROUTING_KEY, b"\xff")
    await (await bus.kv(subjects.BUCKET_REGISTRY)).put(key, b"\x80\x04pickle")
    await settle()
    garbled = view.catalog
    await (await bus.kv(subjects.BUCKET_ROUTING)).delete(subjects.ROUTING_KEY)
    await settle()

    assert garbled.card(_MODEL) is not None
    assert garbled.has_worker(Stage.DECODE, _MODEL)
    assert view.catalog.card(_MODEL) is not None


async def test_lease_is_renewed_survives_an_outage_and_is_given_back(broker: MemoryBroker, clock: ManualClock) -> None:
    registry = await broker.connect().kv(subjects.BUCKET_REGISTRY)
    info = IngressInfo(ingress_id="i", host="h", pid=1, url="http://x")

    async with hold_lease(broker.connect(), clock, info, lease_s=6.0):
        await clock.advance(30.0)
        renewed = await registry.get("ingress.i")
        broker.go_down()
        await clock.advance(10.0)
        await broker.come_back()
        await clock.advance(3.0)
        back = await registry.get("ingress.i")
    given_back = await registry.get("ingress.i")

    assert renewed is not None
    assert codec.decode_registry_entry(renewed.value) == info
    assert back is not None
    assert given_back is None
