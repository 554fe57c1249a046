"""The Yuanrong connector against a real worker: the conformance suite, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import yr.datasystem

from fleet_common.clock import SystemClock
from fleet_common.errors import ContractError, StoreError, TensorNotFoundError
from fleet_common.settings import StoreSettings, YuanrongSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.framing import Compression
from fleet_common.tensors.yuanrong import YuanrongConnector, YuanrongOptions
from fleet_common.testing.servers import ServerProcess, yuanrong_worker
from fleet_common.testing.tensor_conformance import ConnectorConformance, ConnectorRig, numbers
from fleet_contracts.tensors import NetworkPlace, TensorRef

pytestmark = pytest.mark.integration

_TTL_S = 60.0


class Admin:
    """The client of the suite's connectors, so that it knows every key, and the hands to break things with."""

    def __init__(self, server: ServerProcess) -> None:
        self._keys: list[str] = []
        self._client: Any = yr.datasystem.KVClient(
            "127.0.0.1", server.port, connect_timeout_ms=5000, req_timeout_ms=500
        )
        self._client.init()

    def make_client(self, host: str, port: int, timeout_ms: int) -> Admin:
        return self

    def init(self) -> None:
        """It is already."""

    def set(self, key: str, val: bytearray, *, ttl_second: int) -> None:
        self._keys.append(key)
        self._client.set(key, val, ttl_second=ttl_second)

    def get(self, keys: list[str]) -> list[bytes | None]:
        values: list[bytes | None] = self._client.get(keys)
        return values

    def delete(self, keys: list[str]) -> list[str]:
        failed: list[str] = self._client.delete(keys)
        return failed

    def lose_all(self) -> None:
        keys, self._keys = self._keys, []
        for key in keys:
            self._client.delete([key])

    def fill(self) -> None:
        """Values of ever smaller sizes, until not one more fits."""
        deadline_s = time.monotonic() + 30
        for nbytes in (3 << 20, 256 << 10, 32 << 10, 4 << 10):
            while self._has_room(nbytes):
                assert time.monotonic() < deadline_s, "the store does not fill"

    def _has_room(self, nbytes: int) -> bool:
        """Take it, if there is. On a busy machine a call can run out of time and say nothing of room."""
        key = f"fill-{len(self._keys)}"
        try:
            self._client.set(key, bytes(nbytes), ttl_second=60)
        except RuntimeError as err:
            return "Out of memory" not in str(err)
        self._keys.append(key)
        return True


@pytest.fixture(scope="module")
def admin(yuanrong: ServerProcess) -> Admin:
    return Admin(yuanrong)


class TestYuanrong(ConnectorConformance):
    @pytest.fixture(params=list(Compression))
    async def rig(
        self, request: pytest.FixtureRequest, yuanrong: ServerProcess, admin: Admin
    ) -> AsyncIterator[ConnectorRig]:
        options = YuanrongOptions(yuanrong.url, compression=request.param)
        connector = YuanrongConnector(options, SystemClock(), client=admin.make_client)

        async def lose_all() -> None:
            await asyncio.to_thread(admin.lose_all)

        async def fill() -> None:
            await asyncio.to_thread(admin.fill)

        yield ConnectorRig(connector, asyncio.sleep, lose_all, fill)
        await connector.close()
        await lose_all()


@pytest.fixture
async def connector(yuanrong: ServerProcess) -> AsyncIterator[YuanrongConnector]:
    made = YuanrongConnector(YuanrongOptions(yuanrong.url), SystemClock())
    yield made
    await made.close()


@pytest.mark.parametrize("key", ["other", "fleet:t:", "fleet:t:" + "g" * 32])
async def test_reference_to_a_key_that_is_not_ours_is_refused(connector: YuanrongConnector, key: str) -> None:
    ref = TensorRef(place=NetworkPlace(connector="yuanrong", key=key), dtype="uint8", shape=(1,), nbytes=1)

    with pytest.raises(ContractError, match="not a key of ours"):
        await connector.get(ref)


async def test_unreachable_worker_is_a_store_error() -> None:
    connector = YuanrongConnector(YuanrongOptions("127.0.0.1:1", timeout_s=0.5), SystemClock())

    async with asyncio.timeout(10):
        with pytest.raises(StoreError):
            await connector.put(numbers(9), ttl_s=_TTL_S)
    await connector.close()


async def test_hanging_worker_is_a_store_error_in_time_and_works_again_afterwards(
    connector: YuanrongConnector, yuanrong: ServerProcess
) -> None:
    ref = await connector.put(numbers(9), ttl_s=_TTL_S)
    yuanrong.pause()
    try:
        async with asyncio.timeout(5):
            with pytest.raises(StoreError):
                await connector.get(ref)
            with pytest.raises(StoreError):
                await connector.put(numbers(9), ttl_s=_TTL_S)
    finally:
        yuanrong.resume()

    await _until_it_works(connector)


async def test_restarted_worker_misses_what_it_had_and_then_works() -> None:
    with yuanrong_worker() as own:
        connector = YuanrongConnector(YuanrongOptions(own.url), SystemClock())
        ref = await connector.put(numbers(9), ttl_s=_TTL_S)

        await asyncio.to_thread(own.restart)

        await _until_it_works(connector)
        with pytest.raises(TensorNotFoundError):
            await connector.get(ref)
        await connector.close()


async def _until_it_works(connector: YuanrongConnector) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                ref = await connector.put(numbers(8), ttl_s=_TTL_S)
                with await connector.get(ref) as lease:
                    np.testing.assert_array_equal(lease.array, numbers(8))
            except StoreError:
                await asyncio.sleep(0.2)
            else:
                return


async def test_store_opened_from_settings_writes_to_the_network_it_is_told(yuanrong: ServerProcess) -> None:
    settings = StoreSettings(  # type: ignore[call-arg]
        arena_dir=None,
        network="yuanrong",
        yuanrong=YuanrongSettings(worker_address=yuanrong.url),  # type: ignore[call-arg]
    )
    store = await open_store(settings)

    ref = await store.put(numbers(5000), ttl_s=_TTL_S)

    assert isinstance(ref.place, NetworkPlace)
    assert ref.place.connector == "yuanrong"
    with await store.get(ref) as lease:
        np.testing.assert_array_equal(lease.array, numbers(5000))
    await store.close()
