"""From what is wanted to what runs: the keeper over a bucket in memory and a machine that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fleet_cli.errors import CliError
from fleet_cli.records import ModelRecords
from fleet_cli.up.keeper import ModelKeeper
from fleet_cli.up.spec import ServedModel
from fleet_common.bus.memory import MemoryBroker
from fleet_common.errors import BusError
from fleet_common.testing.clock import ManualClock, settle
from fleet_contracts.base import Stage
from fleet_contracts.models import AdapterSpec, ModelSpec, ModelState

PIRATE = AdapterSpec(name="pirate", path="/adapters/pirate")
DRAIN_S = 30.0


@dataclass
class FakeHost:
    """Starts and ends what it is told to; `events` is what happened."""

    events: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    ready: dict[str, asyncio.Event] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    num_waiting: int = 0
    is_broker_out: bool = False

    async def find(self, wanted: ModelSpec) -> ServedModel:
        if wanted.source in self.unknown:
            raise CliError(f"{wanted.source} is no folder")
        return ServedModel(
            wanted.model, wanted.source, {Stage.DECODE: 1}, engine_args=dict(wanted.engine_args), max_adapter_rank=16
        )

    async def start(self, model: ServedModel) -> None:
        self.events.append(f"start {model.name}")
        self.running.add(model.name)
        self.ready.setdefault(model.name, asyncio.Event())

    async def until_ready(self, model: ServedModel) -> None:
        await self.ready[model.name].wait()
        if model.name in self.failures:
            raise CliError(self.failures[model.name])

    def waits_for(self, model: ServedModel) -> str:
        return "decode-0 (loading weights)"

    async def is_idle(self, model: ServedModel) -> bool:
        if self.is_broker_out:
            raise BusError("out")
        return self.num_waiting == 0

    async def stop(self, model: ServedModel) -> None:
        self.events.append(f"stop {model.name}")
        self.running.discard(model.name)
        self.ready.pop(model.name)

    def set_adapters(self, model: ServedModel, adapters: Sequence[AdapterSpec]) -> Mapping[str, str]:
        self.events.append(f"adapters {[adapter.name for adapter in adapters]}")
        return {adapter.name: "its folder is empty" for adapter in adapters if adapter.name == "broken"}


@dataclass
class Rig:
    host: FakeHost
    records: ModelRecords
    clock: ManualClock

    async def want(self, model: str = "m", generation: int = 1, **facts: Any) -> None:
        await self.records.want(ModelSpec(model=model, source=facts.pop("source", "s"), generation=generation, **facts))
        await settle()

    async def ready(self, model: str = "m") -> None:
        self.host.ready[model].set()
        await self.until(lambda: self.state(model) is not ModelState.LOADING)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.001)

    def state(self, model: str = "m") -> ModelState | None:
        status = self.records.status(model)
        return status.state if status is not None else None


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = ManualClock()
    broker = MemoryBroker(clock)
    clock.on_move = broker.tick
    host = FakeHost()
    records = ModelRecords(broker.connect(), lambda wanted: keeper.changed(wanted))
    keeper = ModelKeeper(records, host, clock, drain_s=DRAIN_S)
    await records.start()
    running = asyncio.create_task(keeper.run())
    await settle()
    yield Rig(host, records, clock)
    running.cancel()
    await asyncio.wait([running])
    await records.stop()


async def test_a_model_that_is_wanted_is_started_and_ready_once_its_workers_are(rig: Rig) -> None:
    await rig.want()
    while_loading = rig.state()
    await rig.ready()

    assert while_loading is ModelState.LOADING
    assert rig.state() is ModelState.READY
    assert rig.host.running == {"m"}


async def test_a_failed_load_says_why_leaves_nothing_and_touches_no_other(rig: Rig) -> None:
    await rig.want("good")
    await rig.ready("good")
    rig.host.failures["bad"] = "decode-bad-0 does not start: unknown model type"

    await rig.want("bad")
    await rig.ready("bad")

    status = rig.records.status("bad")
    assert status is not None
    assert (status.state, status.error) == (ModelState.FAILED, "decode-bad-0 does not start: unknown model type")
    assert rig.host.running == {"good"}
    assert rig.state("good") is ModelState.READY
    assert "stop good" not in rig.host.events


async def test_a_model_that_is_not_there_fails_before_anything_is_started(rig: Rig) -> None:
    rig.host.unknown.add("/nowhere")

    await rig.want(source="/nowhere")
    await rig.until(lambda: rig.state() is ModelState.FAILED)

    assert rig.host.events == []


async def test_a_failed_load_is_not_tried_again_until_somebody_asks(rig: Rig) -> None:
    rig.host.failures["m"] = "out of memory"
    await rig.want()
    await rig.ready()
    await rig.clock.advance(600.0)
    tries = rig.host.events.count("start m")
    del rig.host.failures["m"]

    await rig.want(generation=2)
    await rig.ready()

    assert tries == 1
    assert rig.state() is ModelState.READY


async def test_a_model_that_is_unserved_drains_before_its_workers_go(rig: Rig) -> None:
    await rig.want()
    await rig.ready()
    rig.host.num_waiting = 3

    await rig.want(generation=2, is_wanted=False)
    await rig.clock.advance(10.0)
    while_waiting = (rig.state(), set(rig.host.running))
    rig.host.num_waiting = 0
    await rig.clock.advance(3.0)
    await rig.until(lambda: rig.state() is ModelState.GONE)

    assert while_waiting == (ModelState.DRAINING, {"m"})
    assert rig.host.running == set()


async def test_one_empty_look_is_not_enough_and_no_look_is_none(rig: Rig) -> None:
    await rig.want()
    await rig.ready()
    await rig.want(generation=2, is_wanted=False)
    await rig.clock.advance(0.6)
    rig.host.is_broker_out = True
    await rig.clock.advance(5.0)
    still = set(rig.host.running)
    rig.host.is_broker_out = False
    await rig.clock.advance(2.0)

    assert still == {"m"}
    assert rig.host.running == set()


async def test_draining_ends_though_a_request_does_not(rig: Rig) -> None:
    await rig.want()
    await rig.ready()
    rig.host.num_waiting = 1

    await rig.want(generation=2, is_wanted=False)
    await rig.clock.advance(DRAIN_S + 1.0)
    await rig.until(lambda: rig.state() is ModelState.GONE)

    assert rig.host.running == set()


async def test_records_of_a_model_that_is_gone_expire(rig: Rig) -> None:
    await rig.want()
    await rig.ready()
    await rig.want(generation=2, is_wanted=False)
    await rig.clock.advance(3.0)
    await rig.until(lambda: rig.state() is ModelState.GONE)
    await settle()

    await rig.clock.advance(1000.0)

    assert (rig.records.spec("m"), rig.records.status("m")) == (None, None)


async def test_a_model_that_still_loads_can_be_taken_off(rig: Rig) -> None:
    await rig.want()

    await rig.want(generation=2, is_wanted=False)
    await rig.clock.advance(3.0)
    await rig.until(lambda: rig.state() is ModelState.GONE)

    assert rig.host.running == set()


async def test_a_model_that_drains_can_be_kept_after_all(rig: Rig) -> None:
    await rig.want()
    await rig.ready()
    rig.host.num_waiting = 1
    await rig.want(generation=2, is_wanted=False)
    await rig.clock.advance(2.0)

    await rig.want(generation=3)
    await rig.until(lambda: rig.state() is ModelState.READY)

    assert rig.host.events.count("start m") == 1
    assert "stop m" not in rig.host.events


async def test_an_adapter_comes_to_a_running_model_which_is_ready_all_the_while(rig: Rig) -> None:
    await rig.want(takes_adapters=True)
    await rig.ready()
    states: list[ModelState | None] = []
    broken = AdapterSpec(name="broken", path="/x")

    await rig.want(generation=2, takes_adapters=True, adapters=(PIRATE, broken))
    await rig.until(lambda: states.append(rig.state()) or bool((s := rig.records.status("m")) and s.adapters))

    status = rig.records.status("m")
    assert status is not None
    assert (status.adapters, status.adapter_errors) == (("pirate",), {"broken": "its folder is empty"})
    assert rig.host.events.count("start m") == 1
    assert set(states) <= {ModelState.READY, None}


async def test_another_shape_of_the_same_model_replaces_it(rig: Rig) -> None:
    await rig.want()
    await rig.ready()

    await rig.want(generation=2, engine_args={Stage.DECODE: {"max_model_len": 64}})
    await rig.until(lambda: rig.host.events.count("start m") == 2)

    assert rig.host.events[-2:] == ["stop m", "start m"]
