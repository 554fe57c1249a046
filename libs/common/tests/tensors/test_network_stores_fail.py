"""What the clients of Mooncake and Yuanrong answer, and what the fleet makes of it; real servers are in integration."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.settings import MooncakeSettings, StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.mooncake import MooncakeConnector, MooncakeOptions
from fleet_common.tensors.yuanrong import YuanrongConnector, YuanrongOptions
from fleet_common.testing.clock import ManualClock
from fleet_common.testing.tensor_conformance import numbers
from fleet_contracts.tensors import NetworkPlace, TensorRef

_TTL_S = 30.0


@pytest.fixture
def address() -> Iterator[str]:
    """Somebody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@dataclass
class FakeMooncake:
    """Library and client in one; `answers` are given instead of doing anything, by method."""

    values: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    pins_ms: list[int] = field(default_factory=list)
    num_registered: int = 0

    def client(self) -> FakeMooncake:
        return self

    def pinned(self, ttl_ms: int) -> object:
        self.pins_ms.append(ttl_ms)
        return ttl_ms

    def setup(self, config: dict[str, str]) -> int:
        return self.answers.get("setup", 0)

    def register_buffer(self, pointer: int, nbytes: int) -> int:
        self.num_registered += 1
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        self.num_registered -= 1
        return 0

    def put_from(self, key: str, pointer: int, nbytes: int, config: object) -> int:
        self.values[key] = ctypes.string_at(pointer, nbytes)
        return self.answers.get("put", 0)

    def get_into(self, key: str, pointer: int, nbytes: int) -> int:
        value = self.values.get(key, b"")
        ctypes.memmove(pointer, value, min(len(value), nbytes))
        return self.answers.get("get", len(value) or -704)

    def remove(self, key: str, force: bool) -> int:
        return self.answers.get("remove", 0 if self.values.pop(key, None) else -704)

    def close(self) -> int:
        return 0


@pytest.fixture
def library() -> FakeMooncake:
    return FakeMooncake()


@pytest.fixture
async def mooncake(library: FakeMooncake, address: str) -> AsyncIterator[MooncakeConnector]:
    connector = MooncakeConnector(MooncakeOptions(address), ManualClock(), library)
    yield connector
    await connector.close()


@pytest.mark.parametrize("answer", [0, 1, 40, -600, -800])
async def test_mooncake_empty_short_or_lost_value_is_a_miss(
    mooncake: MooncakeConnector, library: FakeMooncake, answer: int
) -> None:
    ref = await mooncake.put(numbers(100), ttl_s=_TTL_S)
    library.answers["get"] = answer

    with pytest.raises(TensorNotFoundError):
        await mooncake.get(ref)
    assert library.num_registered == 0


@pytest.mark.parametrize(("answer", "error"), [(-200, StoreFullError), (-900, StoreError), (-600, StoreError)])
async def test_mooncake_refused_put_says_why(
    mooncake: MooncakeConnector, library: FakeMooncake, answer: int, error: type[StoreError]
) -> None:
    library.answers["put"] = answer

    with pytest.raises(error) as refused:
        await mooncake.put(numbers(9), ttl_s=_TTL_S)
    assert isinstance(refused.value, StoreFullError) == (answer == -200)
    assert mooncake.stats().full_total == (answer == -200)


@pytest.mark.parametrize("method", ["get", "remove"])
async def test_mooncake_out_of_reach_is_a_store_error(
    mooncake: MooncakeConnector, library: FakeMooncake, method: str
) -> None:
    ref = await mooncake.put(numbers(9), ttl_s=_TTL_S)
    library.answers[method] = -900

    with pytest.raises(StoreError):
        await (mooncake.get(ref) if method == "get" else mooncake.release(ref))


async def test_mooncake_is_connected_again_after_it_could_not_be(
    mooncake: MooncakeConnector, library: FakeMooncake
) -> None:
    library.answers["setup"] = -900
    with pytest.raises(StoreError, match="-900"):
        await mooncake.put(numbers(9), ttl_s=_TTL_S)

    library.answers.clear()

    np.testing.assert_array_equal((await mooncake.get(await mooncake.put(numbers(9), ttl_s=_TTL_S))).array, numbers(9))


async def test_mooncake_memory_is_pinned_for_the_life_of_the_tensor(
    mooncake: MooncakeConnector, library: FakeMooncake
) -> None:
    for ttl_s in (0.0001, 30.0, 1e9):
        await mooncake.put(numbers(9), ttl_s=ttl_s)

    assert library.pins_ms == [1, 30_000, 86_400_000]


class FakeYuanrong:
    """A client that fails as it is told."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.ttls_s: list[int] = []
        self.error = ""
        self.num_calls = 0

    def make(self, host: str, port: int, timeout_ms: int) -> FakeYuanrong:
        return self

    def _call(self) -> None:
        self.num_calls += 1
        if self.error:
            raise RuntimeError(self.error)

    def init(self) -> None:
        """Connected."""

    def set(self, key: str, val: bytearray, *, ttl_second: int) -> None:
        self._call()
        self.values[key] = bytes(val)
        self.ttls_s.append(ttl_second)

    def get(self, keys: list[str]) -> list[bytes | None]:
        self._call()
        if keys[0] not in self.values:
            raise RuntimeError("code: [Key not found], msg: [Cannot get objects from worker]")
        return [self.values[keys[0]]]

    def delete(self, keys: list[str]) -> list[str]:
        self._call()
        self.values.pop(keys[0], None)
        return []


class Ticks:
    """A monotonic clock to turn by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def client() -> FakeYuanrong:
    return FakeYuanrong()


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
async def yuanrong(client: FakeYuanrong, ticks: Ticks, address: str) -> AsyncIterator[YuanrongConnector]:
    connector = YuanrongConnector(YuanrongOptions(address), ManualClock(), client.make, ticks)
    yield connector
    await connector.close()


@pytest.mark.parametrize("kept_bytes", [0, 1, 40])
async def test_yuanrong_empty_or_short_value_is_a_miss(
    yuanrong: YuanrongConnector, client: FakeYuanrong, kept_bytes: int
) -> None:
    ref = await yuanrong.put(numbers(100), ttl_s=_TTL_S)
    client.values = {key: value[:kept_bytes] for key, value in client.values.items()}

    with pytest.raises(TensorNotFoundError):
        await yuanrong.get(ref)


async def test_yuanrong_outage_holds_the_process_up_once_and_not_per_call(
    yuanrong: YuanrongConnector, client: FakeYuanrong, ticks: Ticks
) -> None:
    ref = await yuanrong.put(numbers(9), ttl_s=_TTL_S)
    client.error, client.num_calls = "code: [RPC unavailable], msg: [no answer]\nLine of code : 1", 0

    for call in (yuanrong.get(ref), yuanrong.put(numbers(9), ttl_s=_TTL_S), yuanrong.release(ref)):
        with pytest.raises(StoreError, match="RPC unavailable"):
            await call
    assert client.num_calls == 1

    client.error = ""
    ticks.now_s += 2.0
    np.testing.assert_array_equal((await yuanrong.get(ref)).array, numbers(9))


@pytest.mark.parametrize(
    "words",
    [
        "code: [Out of memory], msg: [Shared memory no space in arena: 4]",
        # The last try ran out of time, those before it were answered.
        "code: [RPC unavailable], msg: [timed out.]. RPC Retry detail: [ RPC unavailable * 1 Out of memory * 2 ]",
    ],
)
async def test_yuanrong_without_room_refuses_at_once_for_a_while_what_is_as_large(
    yuanrong: YuanrongConnector, client: FakeYuanrong, ticks: Ticks, words: str
) -> None:
    client.error = words
    for _ in range(3):
        with pytest.raises(StoreFullError):
            await yuanrong.put(numbers(1000), ttl_s=_TTL_S)
    assert (client.num_calls, yuanrong.stats().full_total) == (1, 3)

    client.error = ""
    await yuanrong.put(numbers(9), ttl_s=_TTL_S)
    ticks.now_s += 2.0
    await yuanrong.put(numbers(1000), ttl_s=_TTL_S)


async def test_yuanrong_expiry_is_the_next_whole_second_and_the_frame_is_exact(
    client: FakeYuanrong, address: str
) -> None:
    clock = ManualClock()
    connector = YuanrongConnector(YuanrongOptions(address), clock, client.make)
    ref = await connector.put(numbers(9), ttl_s=1.5)

    await clock.advance(1.6)

    assert client.ttls_s == [2]
    with pytest.raises(TensorNotFoundError, match="expired"):
        await connector.get(ref)
    await connector.close()


async def test_nobody_at_the_address_is_told_without_asking_the_library(client: FakeYuanrong) -> None:
    connector = YuanrongConnector(YuanrongOptions("127.0.0.1:1"), ManualClock(), client.make)

    with pytest.raises(StoreError, match="cannot be reached"):
        await connector.put(numbers(9), ttl_s=_TTL_S)
    assert client.num_calls == 0
    await connector.close()


async def test_a_key_that_is_not_ours_is_refused(mooncake: MooncakeConnector) -> None:
    ref = TensorRef(place=NetworkPlace(connector="mooncake", key="fleet:t:x"), dtype="uint8", shape=(1,), nbytes=1)

    with pytest.raises(ContractError, match="not a key of ours"):
        await mooncake.get(ref)


async def test_a_network_store_without_an_address_is_refused_at_the_start() -> None:
    settings = StoreSettings(arena_dir=None, network="mooncake")  # type: ignore[call-arg]

    with pytest.raises(StoreError, match="'mooncake' has no address"):
        await open_store(settings)


async def test_settings_choose_the_store_that_takes_the_writes(library: FakeMooncake, address: str) -> None:
    settings = StoreSettings(  # type: ignore[call-arg]
        arena_dir=None,
        shm_threshold_bytes=0,
        network="mooncake",
        redis_url="redis://127.0.0.1:1/0",  # type: ignore[arg-type]
        mooncake=MooncakeSettings(master_address=address),  # type: ignore[call-arg]
    )
    mooncake = MooncakeConnector(MooncakeOptions(address), ManualClock(), library)
    store = await open_store(
        settings,
        network={"redis": lambda *_: FakeStore(), "mooncake": lambda *_: mooncake},  # type: ignore[dict-item]
    )

    ref = await store.put(numbers(9), ttl_s=_TTL_S)

    assert isinstance(ref.place, NetworkPlace)
    assert ref.place.connector == "mooncake"
    await store.close()


class FakeStore:
    """A connector that only closes."""

    async def close(self) -> None:
        """Nothing to close."""
