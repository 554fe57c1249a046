"""Which connector a tensor goes to, and how a reader elsewhere gets it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet_common.bus.memory import MemoryBroker
from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.tensors.arena import ArenaConnector
from fleet_common.tensors.factory import memory_store
from fleet_common.tensors.inline import InlineConnector
from fleet_common.tensors.memory import MemoryConnector
from fleet_common.tensors.router import Connectors, FleetTensorStore, SpillCall
from fleet_common.tensors.spill import bus_spill, serve_spill
from fleet_common.testing.clock import ManualClock
from fleet_common.testing.tensor_conformance import numbers, over_the_wire
from fleet_common.testing.tensors import arena_config
from fleet_contracts import subjects
from fleet_contracts.tensors import ArenaPlace, InlinePlace, MemoryPlace, NetworkPlace, TensorRef

_TTL_S = 30.0
_HERE, _THERE = "host-a", "host-b"


def make_host(
    folder: Path, clock: ManualClock, name: str, network: MemoryConnector | None, spill: SpillCall | None = None
) -> FleetTensorStore:
    folder.mkdir(exist_ok=True)
    connectors = Connectors(
        inline=InlineConnector(clock),
        arena=ArenaConnector(arena_config(folder, boot_id=name), clock),
        network={"memory": network} if network is not None else {},
    )
    return FleetTensorStore(connectors, clock, locality=name, inline_bytes=1024, spill=spill)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def network(clock: ManualClock) -> MemoryConnector:
    return MemoryConnector(clock)


@pytest.fixture
async def store(tmp_path: Path, clock: ManualClock, network: MemoryConnector) -> AsyncIterator[FleetTensorStore]:
    made = make_host(tmp_path / "a", clock, _HERE, network)
    yield made
    await made.close()


async def test_place_follows_size_and_locality(store: FleetTensorStore) -> None:
    small, large = numbers(256), numbers(257)

    places = [
        (await store.put(array, ttl_s=_TTL_S, locality=locality)).place
        for array, locality in [(small, _HERE), (small, None), (large, _HERE), (large, _THERE), (large, None)]
    ]

    assert [type(place) for place in places] == [InlinePlace, InlinePlace, ArenaPlace, MemoryPlace, MemoryPlace]


async def test_every_place_is_read_back(store: FleetTensorStore) -> None:
    for array, locality in [(numbers(3), None), (numbers(5000), _HERE), (numbers(5000), _THERE)]:
        ref = over_the_wire(await store.put(array, ttl_s=_TTL_S, locality=locality))

        with await store.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, array)
        await store.release(ref)


async def test_full_arena_spills_to_the_network(store: FleetTensorStore) -> None:
    arrays = [np.full(1 << 20, i, np.uint8) for i in range(8)]

    refs = [await store.put(array, ttl_s=_TTL_S, locality=_HERE) for array in arrays]

    assert {type(ref.place) for ref in refs} == {ArenaPlace, MemoryPlace}
    for ref, array in zip(refs, arrays, strict=True):
        with await store.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, array)
    assert store.stats()["arena"].spill_total == sum(isinstance(ref.place, MemoryPlace) for ref in refs)


async def test_full_arena_without_a_network_refuses(tmp_path: Path, clock: ManualClock) -> None:
    store = make_host(tmp_path / "a", clock, _HERE, None)

    with pytest.raises(StoreFullError):
        for _ in range(8):
            await store.put(np.zeros(1 << 20, np.uint8), ttl_s=_TTL_S, locality=_HERE)
    await store.close()


async def test_arena_serves_unknown_readers_when_there_is_no_network(tmp_path: Path, clock: ManualClock) -> None:
    store = make_host(tmp_path / "a", clock, _HERE, None)

    for unknown in (None, ""):
        assert isinstance((await store.put(numbers(5000), ttl_s=_TTL_S, locality=unknown)).place, ArenaPlace)
    with pytest.raises(StoreError):
        await store.put(numbers(5000), ttl_s=_TTL_S, locality=_THERE)
    await store.close()


async def test_unknown_connector_is_a_store_error(store: FleetTensorStore) -> None:
    ref = TensorRef(place=NetworkPlace(connector="mooncake", key="k"), dtype="uint8", shape=(1,), nbytes=1)

    with pytest.raises(StoreError):
        await store.get(ref)


class TestReservation:
    async def test_reserved_parts_go_to_the_arena_and_the_rest_spills(self, store: FleetTensorStore) -> None:
        part = np.ones(200_000, np.uint8)
        reservation = await store.reserve(400_000, ttl_s=10)
        for _ in range(8):
            await store.put(np.zeros(1 << 20, np.uint8), ttl_s=_TTL_S, locality=_HERE)
        with pytest.raises(StoreFullError):
            await store.reserve(1 << 20, ttl_s=10)

        refs = [await reservation.put(part, ttl_s=_TTL_S) for _ in range(2)]
        tiny = await reservation.put(part[:10], ttl_s=_TTL_S)
        surplus = await reservation.put(np.ones(1 << 20, np.uint8), ttl_s=_TTL_S)
        await reservation.cancel()

        assert [type(ref.place) for ref in refs] == [ArenaPlace, ArenaPlace]
        assert (type(tiny.place), type(surplus.place)) == (InlinePlace, MemoryPlace)

    async def test_store_without_arena_refuses_to_reserve(self) -> None:
        with pytest.raises(StoreFullError):
            await memory_store().reserve(10, ttl_s=1)


class TestForeignReader:
    """A reader on another host that meets an arena reference."""

    @pytest.fixture
    def broker(self) -> MemoryBroker:
        return MemoryBroker()

    @pytest.fixture
    async def reader(
        self, tmp_path: Path, clock: ManualClock, network: MemoryConnector, broker: MemoryBroker
    ) -> AsyncIterator[FleetTensorStore]:
        made = make_host(tmp_path / "b", clock, _THERE, network, bus_spill(broker.connect(), timeout_s=0.2))
        yield made
        await made.close()

    async def test_owner_spills_on_demand(
        self, store: FleetTensorStore, reader: FleetTensorStore, broker: MemoryBroker
    ) -> None:
        server = await serve_spill(broker.connect(), store)
        array = numbers(5000)
        ref = over_the_wire(await store.put(array, ttl_s=_TTL_S, locality=_HERE, content_hash="h"))

        with await reader.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, array)

        assert store.stats()["arena"].spill_total == 1
        await server.stop()

    async def test_freed_tensor_is_a_miss(
        self, store: FleetTensorStore, reader: FleetTensorStore, broker: MemoryBroker
    ) -> None:
        server = await serve_spill(broker.connect(), store)
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)
        await store.release(ref)

        with pytest.raises(TensorNotFoundError):
            await reader.get(ref)
        await server.stop()

    async def test_expired_tensor_is_a_miss(
        self, store: FleetTensorStore, reader: FleetTensorStore, broker: MemoryBroker, clock: ManualClock
    ) -> None:
        server = await serve_spill(broker.connect(), store)
        ref = await store.put(numbers(5000), ttl_s=1, locality=_HERE)
        await clock.advance(2)

        with pytest.raises(TensorNotFoundError):
            await reader.get(ref)
        await server.stop()

    async def test_dead_owner_is_a_miss(self, store: FleetTensorStore, reader: FleetTensorStore) -> None:
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)

        with pytest.raises(TensorNotFoundError):
            await reader.get(ref)

    async def test_owner_that_does_not_answer_is_an_outage_not_a_miss(
        self, store: FleetTensorStore, reader: FleetTensorStore, broker: MemoryBroker
    ) -> None:
        async def silence(_: object) -> None:
            return None

        assert store.arena is not None
        subject = subjects.spill(_HERE, store.arena.config.owner)
        await broker.connect().subscribe(subject, silence)
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)

        with pytest.raises(StoreError):
            await reader.get(ref)

    async def test_broker_outage_is_an_outage_not_a_miss(
        self, store: FleetTensorStore, reader: FleetTensorStore, broker: MemoryBroker
    ) -> None:
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)
        broker.go_down()

        with pytest.raises(StoreError):
            await reader.get(ref)

    async def test_nonsense_does_not_stop_the_server(
        self, store: FleetTensorStore, reader: FleetTensorStore, broker: MemoryBroker
    ) -> None:
        server = await serve_spill(broker.connect(), store)
        assert store.arena is not None
        await broker.connect().publish(subjects.spill(_HERE, store.arena.config.owner), b"\xc1nonsense")
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)

        (await reader.get(ref)).close()
        await server.stop()

    @pytest.mark.parametrize("boot_id", ["a b", "", "x.y", ">"])
    async def test_boot_id_that_fits_no_subject_is_a_miss(
        self, store: FleetTensorStore, reader: FleetTensorStore, boot_id: str
    ) -> None:
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)
        forged = msgspec.structs.replace(ref, place=msgspec.structs.replace(ref.place, boot_id=boot_id))

        with pytest.raises(TensorNotFoundError):
            await reader.get(forged)

    async def test_owner_that_answers_with_another_arena_place_is_refused(
        self, tmp_path: Path, clock: ManualClock, store: FleetTensorStore, network: MemoryConnector
    ) -> None:
        async def echo(ref: TensorRef) -> TensorRef:
            return ref

        reader = make_host(tmp_path / "c", clock, _THERE, network, echo)
        ref = await store.put(numbers(5000), ttl_s=_TTL_S, locality=_HERE)

        with pytest.raises(ContractError):
            await reader.get(ref)
        await reader.close()
