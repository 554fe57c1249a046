"""The Redis connector against a real server: the conformance suite, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis.asyncio
from pydantic import SecretStr

from fleet_common.clock import SystemClock
from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.settings import StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.framing import Compression
from fleet_common.tensors.redis import RedisConnector, RedisOptions
from fleet_common.testing.servers import ServerProcess, valkey_server
from fleet_common.testing.tensor_conformance import ConnectorConformance, ConnectorRig, numbers
from fleet_contracts.tensors import ArenaPlace, NetworkPlace, TensorRef

pytestmark = pytest.mark.integration

_TTL_S = 60.0
_PASSWORD = "secret"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with valkey_server(password=_PASSWORD) as running:
        yield running


@pytest.fixture
async def admin(server: ServerProcess) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of our own, to break things with; what it set is put back."""
    client = redis.asyncio.Redis.from_url(server.url)
    yield client
    await client.config_set("maxmemory", "0")
    await client.flushall()
    await client.aclose()


@pytest.fixture
async def connector(server: ServerProcess) -> AsyncIterator[RedisConnector]:
    made = RedisConnector(RedisOptions(server.url, timeout_s=2.0), SystemClock())
    yield made
    await made.close()


class TestRedis(ConnectorConformance):
    @pytest.fixture(params=list(Compression))
    async def rig(
        self, request: pytest.FixtureRequest, server: ServerProcess, admin: redis.asyncio.Redis
    ) -> AsyncIterator[ConnectorRig]:
        connector = RedisConnector(RedisOptions(server.url, compression=request.param), SystemClock())

        async def lose_all() -> None:
            await admin.flushall()

        async def fill() -> None:
            await admin.config_set("maxmemory-policy", "noeviction")
            await admin.config_set("maxmemory", "1mb")

        yield ConnectorRig(connector, asyncio.sleep, lose_all, fill)
        await connector.close()


async def test_server_expires_tensors_by_itself(connector: RedisConnector, admin: redis.asyncio.Redis) -> None:
    ref = await connector.put(numbers(9), ttl_s=60)

    left_s = await admin.pttl(_key(ref)) / 1000

    assert 50 < left_s <= 60


async def test_keys_are_unguessable_and_never_written_twice(
    connector: RedisConnector, admin: redis.asyncio.Redis
) -> None:
    refs = [await connector.put(numbers(9), ttl_s=_TTL_S) for _ in range(3)]

    assert len({_key(ref) for ref in refs}) == 3
    assert all(len(_key(ref).removeprefix("fleet:t:")) == 32 for ref in refs)


@pytest.mark.parametrize("damage", ["", "x", "cut", "flip"])
async def test_damaged_value_is_a_miss(connector: RedisConnector, admin: redis.asyncio.Redis, damage: str) -> None:
    ref = await connector.put(numbers(100), ttl_s=_TTL_S)
    value = bytearray(await admin.get(_key(ref)))
    if damage == "flip":
        value[150] ^= 1

    await admin.set(_key(ref), {"cut": bytes(value[:-1]), "flip": bytes(value)}.get(damage, damage.encode()))

    with pytest.raises(TensorNotFoundError):
        await connector.get(ref)


async def test_value_of_another_kind_is_a_store_error(connector: RedisConnector, admin: redis.asyncio.Redis) -> None:
    ref = await connector.put(numbers(100), ttl_s=_TTL_S)
    await admin.delete(_key(ref))
    await admin.rpush(_key(ref), "a")

    with pytest.raises(StoreError):
        await connector.get(ref)


@pytest.mark.parametrize("key", ["other", "fleet:t:", "fleet:t:" + "g" * 32, "fleet:t:" + "a" * 32 + "\n"])
async def test_reference_to_a_key_that_is_not_ours_is_refused(connector: RedisConnector, key: str) -> None:
    ref = TensorRef(place=NetworkPlace(connector="redis", key=key), dtype="uint8", shape=(1,), nbytes=1)

    with pytest.raises(ContractError, match="not a key of ours"):
        await connector.get(ref)


async def test_unreachable_server_is_a_store_error() -> None:
    connector = RedisConnector(RedisOptions("redis://127.0.0.1:1/0", timeout_s=0.5), SystemClock())
    ref = TensorRef(
        place=NetworkPlace(connector="redis", key="fleet:t:" + "a" * 32), dtype="uint8", shape=(1,), nbytes=1
    )

    for call in (connector.put(numbers(9), ttl_s=1), connector.get(ref), connector.release(ref), connector.ping()):
        with pytest.raises(StoreError):
            await call
    await connector.close()


async def test_wrong_password_is_a_store_error(server: ServerProcess) -> None:
    connector = RedisConnector(RedisOptions(server.url.replace(_PASSWORD, "wrong"), timeout_s=1.0), SystemClock())

    with pytest.raises(StoreError):
        await connector.put(numbers(9), ttl_s=1)
    await connector.close()


async def test_hanging_server_is_a_store_error_in_time_and_works_again_afterwards(
    connector: RedisConnector, server: ServerProcess
) -> None:
    ref = await connector.put(numbers(9), ttl_s=_TTL_S)
    quick = RedisConnector(RedisOptions(server.url, timeout_s=0.2), SystemClock())
    server.pause()
    try:
        async with asyncio.timeout(5):
            with pytest.raises(StoreError):
                await quick.get(ref)
    finally:
        server.resume()

    with await quick.get(ref) as lease:
        np.testing.assert_array_equal(lease.array, numbers(9))
    await quick.close()


async def test_restarted_server_misses_first_and_then_works() -> None:
    with valkey_server() as own:
        connector = RedisConnector(RedisOptions(own.url), SystemClock())
        ref = await connector.put(numbers(9), ttl_s=_TTL_S)
        await asyncio.to_thread(own.restart)

        with pytest.raises(TensorNotFoundError):
            await connector.get(ref)
        with await connector.get(await connector.put(numbers(8), ttl_s=_TTL_S)) as lease:
            np.testing.assert_array_equal(lease.array, numbers(8))
        await connector.close()


async def test_full_arena_spills_to_redis_and_flush_is_a_miss(
    server: ServerProcess, admin: redis.asyncio.Redis, tmp_path: Path
) -> None:
    settings = StoreSettings(  # type: ignore[call-arg]
        arena_dir=tmp_path, arena_bytes=3 << 20, redis_url=SecretStr(server.url)
    )
    store = await open_store(settings)
    arrays = [np.full(1 << 20, i, np.uint8) for i in range(4)]
    refs = [await store.put(array, ttl_s=_TTL_S, locality=store.locality) for array in arrays]

    for ref, array in zip(refs, arrays, strict=True):
        with await store.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, array)
    await admin.flushall()

    assert [type(ref.place) for ref in refs] == [ArenaPlace, ArenaPlace, NetworkPlace, NetworkPlace]
    with pytest.raises(TensorNotFoundError):
        await store.get(refs[-1])
    with pytest.raises(StoreFullError):
        await admin.config_set("maxmemory", "1mb")
        await store.put(arrays[0], ttl_s=_TTL_S, locality=store.locality)
    await store.close()


async def test_cancelled_calls_never_hand_their_reply_to_the_next_caller(
    connector: RedisConnector, server: ServerProcess
) -> None:
    """Case C21 (CVE-2023-28858): 400 concurrent gets through a slow proxy, 200 of them cancelled at random times."""
    refs = [await connector.put(np.full(500, i, np.int64), ttl_s=_TTL_S) for i in range(400)]
    chance = random.Random(21)
    async with _delaying_proxy(server.port, 0.05) as port:
        options = RedisOptions(server.url.replace(str(server.port), str(port)), timeout_s=10, max_connections=16)
        slow = RedisConnector(options, SystemClock())
        gets = [asyncio.create_task(slow.get(ref)) for ref in refs]
        for number in chance.sample(range(400), 200):
            await asyncio.sleep(chance.uniform(0, 0.01))
            gets[number].cancel()
        results = await asyncio.gather(*gets, return_exceptions=True)
        afterwards = [await slow.get(ref) for ref in refs[:20]]
        await slow.close()

    completed = 0
    for number, result in enumerate(results):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert not isinstance(result, BaseException), result
        assert (result.array == number).all()
        completed += 1
    assert 200 <= completed < 400
    assert all((lease.array == number).all() for number, lease in enumerate(afterwards))


@contextlib.asynccontextmanager
async def _delaying_proxy(port: int, delay_s: float) -> AsyncIterator[int]:
    """A TCP proxy on a free port that holds every chunk to the server back."""
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                await asyncio.sleep(wait_s)
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        for task in (pipe(reader, up_writer, delay_s), pipe(up_reader, writer, 0.0)):
            pipes.add(asyncio.create_task(task))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield urlsplit(f"//127.0.0.1:{proxy.sockets[0].getsockname()[1]}").port or 0
    finally:
        proxy.close()
        for task in pipes:
            task.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)


def _key(ref: TensorRef) -> str:
    assert isinstance(ref.place, NetworkPlace)
    return ref.place.key
