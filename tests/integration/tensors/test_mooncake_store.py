"""The Mooncake connector against real servers: the conformance suite, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import mooncake.store
import numpy as np
import pytest

from fleet_common.clock import SystemClock
from fleet_common.errors import ContractError, StoreError, TensorNotFoundError
from fleet_common.settings import MooncakeSettings, StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.framing import Compression
from fleet_common.tensors.mooncake import MooncakeConnector, MooncakeOptions
from fleet_common.testing.servers import MooncakeServers, mooncake_servers
from fleet_common.testing.tensor_conformance import ConnectorConformance, ConnectorRig, numbers
from fleet_contracts.tensors import NetworkPlace, TensorRef

pytestmark = pytest.mark.integration

_TTL_S = 60.0


class SharedClient(mooncake.store.MooncakeDistributedStore):  # type: ignore[misc]
    """One client for the whole suite: a real `close` takes a second."""

    def setup(self, config: object) -> int:
        return 0

    def close(self) -> int:
        return 0


class Admin:
    """The client of the suite's connectors, and the hands to break things with."""

    def __init__(self, servers: MooncakeServers) -> None:
        self._client = SharedClient()
        code = super(SharedClient, self._client).setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", servers.address
        )
        assert code == 0

    def client(self) -> SharedClient:
        return self._client

    def pinned(self, ttl_ms: int) -> object:
        config = mooncake.store.ReplicateConfig()
        config.soft_pin_action = mooncake.store.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = ttl_ms
        return config

    def lose_all(self) -> None:
        assert self._client.remove_all(True) >= 0

    def fill(self) -> None:
        """Pinned values of ever smaller sizes, until not one more fits."""
        for nbytes in (3 << 20, 256 << 10, 32 << 10, 4 << 10):
            number = 0
            while self._client.put(f"fill-{nbytes}-{number}", bytes(nbytes), self.pinned(60_000)) == 0:
                number += 1

    def close(self) -> None:
        super(SharedClient, self._client).close()


@pytest.fixture(scope="module")
def admin(mooncake: MooncakeServers) -> Iterator[Admin]:
    admin = Admin(mooncake)
    yield admin
    admin.close()


class TestMooncake(ConnectorConformance):
    @pytest.fixture(params=list(Compression))
    async def rig(
        self, request: pytest.FixtureRequest, mooncake: MooncakeServers, admin: Admin
    ) -> AsyncIterator[ConnectorRig]:
        options = MooncakeOptions(mooncake.address, compression=request.param)
        connector = MooncakeConnector(options, SystemClock(), library=admin)

        async def lose_all() -> None:
            await asyncio.to_thread(admin.lose_all)

        async def fill() -> None:
            await asyncio.to_thread(admin.fill)

        yield ConnectorRig(connector, asyncio.sleep, lose_all, fill)
        await connector.close()
        await lose_all()


@pytest.fixture
async def connector(mooncake: MooncakeServers) -> AsyncIterator[MooncakeConnector]:
    made = MooncakeConnector(MooncakeOptions(mooncake.address), SystemClock())
    yield made
    await made.close()


async def test_a_process_that_lends_memory_takes_its_tensors_along(mooncake: MooncakeServers, admin: Admin) -> None:
    """They went to the storage node or to the lender; wherever they are, nothing is torn."""
    lender = MooncakeConnector(MooncakeOptions(mooncake.address, segment_bytes=32 << 20), SystemClock())
    reader = MooncakeConnector(MooncakeOptions(mooncake.address), SystemClock())
    refs = [await lender.put(numbers(100_000), ttl_s=_TTL_S) for _ in range(20)]
    for ref in refs:
        with await reader.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, numbers(100_000))
    await lender.close()

    for ref in refs:
        try:
            with await reader.get(ref) as lease:
                np.testing.assert_array_equal(lease.array, numbers(100_000))
        except TensorNotFoundError:
            pass
    await reader.close()
    admin.lose_all()


@pytest.mark.parametrize("key", ["other", "fleet:t:", "fleet:t:" + "g" * 32])
async def test_reference_to_a_key_that_is_not_ours_is_refused(connector: MooncakeConnector, key: str) -> None:
    ref = TensorRef(place=NetworkPlace(connector="mooncake", key=key), dtype="uint8", shape=(1,), nbytes=1)

    with pytest.raises(ContractError, match="not a key of ours"):
        await connector.get(ref)


async def test_unreachable_master_is_a_store_error() -> None:
    connector = MooncakeConnector(MooncakeOptions("127.0.0.1:1", timeout_s=2.0), SystemClock())

    async with asyncio.timeout(10):
        with pytest.raises(StoreError):
            await connector.put(numbers(9), ttl_s=_TTL_S)
    await connector.close()


async def test_lost_node_is_a_miss_and_a_lost_master_a_store_error_until_they_are_back() -> None:
    with mooncake_servers() as own:
        connector = MooncakeConnector(MooncakeOptions(own.address, timeout_s=8.0), SystemClock())
        ref = await connector.put(numbers(9), ttl_s=_TTL_S)

        await asyncio.to_thread(own.node.kill)
        with pytest.raises(TensorNotFoundError):
            await connector.get(ref)
        with pytest.raises(StoreError):
            await connector.put(numbers(9), ttl_s=_TTL_S)
        await asyncio.to_thread(own.master.kill)
        with pytest.raises(StoreError):
            await connector.get(ref)

        await asyncio.to_thread(own.master.restart)
        await asyncio.to_thread(own.node.restart)
        await _until_it_works(connector)
        await connector.close()


async def _until_it_works(connector: MooncakeConnector) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                ref = await connector.put(numbers(8), ttl_s=_TTL_S)
                with await connector.get(ref) as lease:
                    np.testing.assert_array_equal(lease.array, numbers(8))
            except (StoreError, TensorNotFoundError):
                await asyncio.sleep(0.2)
            else:
                return


async def test_store_opened_from_settings_writes_to_the_network_it_is_told(mooncake: MooncakeServers) -> None:
    settings = StoreSettings(  # type: ignore[call-arg]
        arena_dir=None,
        network="mooncake",
        mooncake=MooncakeSettings(master_address=mooncake.address),  # type: ignore[call-arg]
    )
    store = await open_store(settings)

    ref = await store.put(numbers(5000), ttl_s=_TTL_S)

    assert isinstance(ref.place, NetworkPlace)
    assert ref.place.connector == "mooncake"
    with await store.get(ref) as lease:
        np.testing.assert_array_equal(lease.array, numbers(5000))
    await store.close()
