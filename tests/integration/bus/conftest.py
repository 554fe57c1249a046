from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from fleet_common.bus.apply import apply
from fleet_common.bus.memory import MemoryBroker
from fleet_common.bus.memory_work import WorkLimits
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.settings import BusSettings
from fleet_common.testing.bus_rig import LIMITS, SPEC, AdminBus, Rig
from fleet_common.testing.servers import ServerProcess, nats_server


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with nats_server() as process:
        yield process


@pytest.fixture
def settings(server: ServerProcess) -> BusSettings:
    return BusSettings(url=server.url)  # type: ignore[call-arg]


@pytest.fixture
async def applied(settings: BusSettings) -> BusSettings:
    await apply(settings, SPEC, LIMITS)
    return settings


@pytest.fixture(params=["memory", "nats"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    with contextlib.ExitStack() as stack:
        if request.param == "memory":
            limits = WorkLimits(LIMITS.ack_wait_s, LIMITS.max_deliver, LIMITS.max_msgs)
            broker = MemoryBroker(limits=limits)

            async def connect() -> AdminBus:
                return broker.connect()
        else:
            url = stack.enter_context(nats_server()).url
            nats_settings = BusSettings(url=url)  # type: ignore[call-arg]
            await apply(nats_settings, SPEC, LIMITS)

            async def connect() -> AdminBus:
                return await connect_bus(nats_settings, "test")

        rig = Rig(connect)
        yield rig
        await rig.close()


@pytest.fixture
async def bus(applied: BusSettings) -> AsyncIterator[NatsBus]:
    bus = await connect_bus(applied, "test")
    yield bus
    await bus.close()


@pytest.fixture
async def other(applied: BusSettings) -> AsyncIterator[NatsBus]:
    bus = await connect_bus(applied, "other")
    yield bus
    await bus.close()
