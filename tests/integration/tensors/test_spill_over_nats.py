"""A reader on another host gets an arena tensor through the broker and Redis: real servers, two stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from fleet_common.bus.nats import connect_bus
from fleet_common.bus.port import Bus
from fleet_common.errors import TensorNotFoundError
from fleet_common.settings import BusSettings, StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_common.tensors.spill import bus_spill, serve_spill
from fleet_common.testing.servers import nats_server, valkey_server
from fleet_contracts.tensors import ArenaPlace

pytestmark = pytest.mark.integration

_TTL_S = 60.0


@dataclass(frozen=True, slots=True)
class Host:
    """A process on a host of its own."""

    store: FleetTensorStore
    bus: Bus


@pytest.fixture
def urls() -> Iterator[tuple[str, str]]:
    with nats_server() as nats, valkey_server() as valkey:
        yield nats.url, valkey.url


@pytest.fixture
async def hosts(urls: tuple[str, str], tmp_path: Path) -> AsyncIterator[tuple[Host, Host]]:
    made = []
    for name in ("a", "b"):
        bus = await connect_bus(BusSettings(url=urls[0]), name)  # type: ignore[call-arg]
        folder = tmp_path / name
        folder.mkdir()
        settings = StoreSettings(  # type: ignore[call-arg]
            arena_dir=folder, arena_bytes=64 << 20, redis_url=SecretStr(urls[1])
        )
        made.append(Host(await open_store(settings, boot_id=f"boot-{name}", spill=bus_spill(bus)), bus))
    yield made[0], made[1]
    for host in made:
        await host.store.close()
        await host.bus.close()


async def test_foreign_reader_gets_the_tensor_from_its_owner(hosts: tuple[Host, Host]) -> None:
    owner, reader = hosts
    server = await serve_spill(owner.bus, owner.store)
    arrays = [np.full((576, 4096), i, np.uint16) for i in range(3)]
    refs = [await owner.store.put(a, ttl_s=_TTL_S, locality="boot-a", dtype="bfloat16") for a in arrays]

    async with asyncio.timeout(20):
        leases = await asyncio.gather(*(reader.store.get(ref) for ref in refs))

    assert all(isinstance(ref.place, ArenaPlace) for ref in refs)
    for lease, array in zip(leases, arrays, strict=True):
        np.testing.assert_array_equal(lease.array, array)
        lease.close()
    await server.stop()


async def test_foreign_reader_misses_at_once_when_the_owner_is_gone(hosts: tuple[Host, Host]) -> None:
    owner, reader = hosts
    server = await serve_spill(owner.bus, owner.store)
    ref = await owner.store.put(np.ones(5000, np.uint8), ttl_s=_TTL_S, locality="boot-a")
    await server.stop()
    await owner.bus.close()

    async with asyncio.timeout(2):
        with pytest.raises(TensorNotFoundError):
            await reader.store.get(ref)
