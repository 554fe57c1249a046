"""The arena: slots, generations, leases, quota and time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.tensors.arena import ArenaConnector
from fleet_common.tensors.leases import SegmentMissingError
from fleet_common.testing.clock import ManualClock
from fleet_common.testing.tensor_conformance import numbers
from fleet_common.testing.tensors import arena_config, files_in
from fleet_contracts.tensors import ArenaPlace, TensorRef

_TTL_S = 30.0
_KB = 1 << 10
_WELL_NAMED = f"test-{'a' * 16}-64k-{'b' * 16}"
_HOSTILE_NAMES = ("../x", "/etc/passwd", "", ".", "a" * 300, "test-0-64k-0", "x\0y", _WELL_NAMED + "\n")
_MB = 1 << 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def arena(tmp_path: Path, clock: ManualClock) -> AsyncIterator[ArenaConnector]:
    connector = ArenaConnector(arena_config(tmp_path), clock)
    yield connector
    await connector.close()


def place(ref: TensorRef) -> ArenaPlace:
    assert isinstance(ref.place, ArenaPlace)
    return ref.place


def remove_all_in(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def at(ref: TensorRef, **changes: object) -> TensorRef:
    return msgspec.structs.replace(ref, place=msgspec.structs.replace(ref.place, **changes))


async def test_freed_slot_is_reused_last_in_first_out_and_old_references_stay_stale(arena: ArenaConnector) -> None:
    first = await arena.put(numbers(100), ttl_s=_TTL_S)
    await arena.release(first)

    second = await arena.put(numbers(100) + 1, ttl_s=_TTL_S)

    assert (place(second).segment, place(second).slot) == (place(first).segment, place(first).slot)
    assert place(second).generation > place(first).generation
    with pytest.raises(TensorNotFoundError):
        await arena.get(first)


async def test_reader_keeps_its_slot_from_being_freed_until_it_closes(
    arena: ArenaConnector, clock: ManualClock
) -> None:
    ref = await arena.put(numbers(100), ttl_s=_TTL_S)
    lease = await arena.get(ref)
    await arena.release(ref)

    arena.sweep(clock.unix_s())
    other = await arena.put(numbers(100) + 1, ttl_s=_TTL_S)
    assert (place(other).slot, arena.stats().num_tensors) != (place(ref).slot, 1)
    np.testing.assert_array_equal(lease.array, numbers(100))

    lease.close()
    arena.sweep(clock.unix_s())
    assert arena.stats().num_tensors == 1


async def test_second_lease_keeps_the_slot_after_the_first_is_closed(arena: ArenaConnector, clock: ManualClock) -> None:
    ref = await arena.put(numbers(100), ttl_s=_TTL_S)
    first, second = await arena.get(ref), await arena.get(ref)

    first.close()
    await arena.release(ref)
    assert arena.stats().num_tensors == 1

    second.close()
    arena.sweep(clock.unix_s())
    assert arena.stats().num_tensors == 0


async def test_forgotten_lease_goes_with_the_last_array_over_it(arena: ArenaConnector) -> None:
    ref = await arena.put(numbers(100), ttl_s=_TTL_S)
    part = (await arena.get(ref)).array[10:20].reshape(2, 5)
    gc.collect()
    assert arena.stats().num_leases == 1

    del part
    gc.collect()

    assert arena.stats().num_leases == 0


async def test_expired_tensors_are_freed_but_never_under_a_reader(arena: ArenaConnector, clock: ManualClock) -> None:
    read = await arena.put(numbers(100), ttl_s=1)
    await arena.put(numbers(100), ttl_s=1)
    lease = await arena.get(read)
    await clock.advance(2)

    arena.sweep(clock.unix_s())

    assert arena.stats().num_tensors == 1
    np.testing.assert_array_equal(lease.array, numbers(100))
    lease.close()
    arena.sweep(clock.unix_s())
    assert arena.stats().num_tensors == 0


async def test_another_process_on_the_host_reads_and_releases(
    arena: ArenaConnector, tmp_path: Path, clock: ManualClock
) -> None:
    reader = ArenaConnector(arena_config(tmp_path), clock)
    ref = await arena.put(numbers(100), ttl_s=_TTL_S)

    with await reader.get(ref) as lease:
        np.testing.assert_array_equal(lease.array, numbers(100))
        await reader.release(ref)
        arena.sweep(clock.unix_s())
        assert arena.stats().num_tensors == 1
    arena.sweep(clock.unix_s())

    assert arena.stats().num_tensors == 0
    with pytest.raises(TensorNotFoundError):
        await reader.get(ref)


async def test_late_release_of_a_reused_slot_does_no_harm(
    arena: ArenaConnector, tmp_path: Path, clock: ManualClock
) -> None:
    reader = ArenaConnector(arena_config(tmp_path), clock)
    stale = await arena.put(numbers(100), ttl_s=_TTL_S)
    await arena.release(stale)
    fresh = await arena.put(numbers(100), ttl_s=_TTL_S)

    await reader.release(stale)
    await reader.release(at(fresh, slot=1 << 30))
    await reader.release(at(fresh, slot=-1))
    await reader.release(at(fresh, segment="../../etc/passwd"))
    arena.sweep(clock.unix_s())

    with await reader.get(fresh) as lease:
        np.testing.assert_array_equal(lease.array, numbers(100))


async def test_full_arena_refuses_and_recovers_after_release(arena: ArenaConnector) -> None:
    refs = []
    with pytest.raises(StoreFullError):
        while True:
            refs.append(await arena.put(np.zeros(_MB, np.uint8), ttl_s=_TTL_S))

    await arena.release(refs[0])

    assert len(refs) == 3
    await arena.put(np.zeros(_MB, np.uint8), ttl_s=_TTL_S)
    assert arena.stats().full_total == 1


async def test_segments_together_stay_within_the_quota(arena: ArenaConnector, tmp_path: Path) -> None:
    with pytest.raises(StoreFullError):
        while True:
            await arena.put(np.zeros(60 * _KB, np.uint8), ttl_s=_TTL_S)

    assert sum(files_in(tmp_path).values()) <= arena.config.quota_bytes


async def test_idle_segments_make_room_for_another_class(arena: ArenaConnector) -> None:
    small = [await arena.put(numbers(100), ttl_s=_TTL_S)]
    with pytest.raises(StoreFullError):
        while True:
            small.append(await arena.put(np.zeros(60 * _KB, np.uint8), ttl_s=_TTL_S))
    for ref in small:
        await arena.release(ref)

    ref = await arena.put(np.ones(_MB, np.uint8), ttl_s=_TTL_S)

    with await arena.get(ref) as lease:
        assert lease.array.sum() == _MB


async def test_small_tensor_takes_a_larger_slot_rather_than_none(arena: ArenaConnector) -> None:
    refs = []
    with pytest.raises(StoreFullError):
        while True:
            refs.append(await arena.put(np.zeros(_MB, np.uint8), ttl_s=_TTL_S))
    with pytest.raises(StoreFullError):
        while True:
            await arena.put(numbers(10), ttl_s=_TTL_S)
    await arena.release(refs[1])

    ref = await arena.put(numbers(10), ttl_s=_TTL_S)

    assert place(ref).segment == place(refs[1]).segment


async def test_tensor_above_all_classes_gets_a_segment_of_its_own_that_goes_with_it(
    tmp_path: Path, clock: ManualClock
) -> None:
    arena = ArenaConnector(arena_config(tmp_path, quota_bytes=80 * _MB), clock)
    array = np.arange(65 * _MB, dtype=np.uint8)

    ref = await arena.put(array, ttl_s=_TTL_S)
    with await arena.get(ref) as lease:
        assert np.array_equal(lease.array, array)
    with pytest.raises(StoreFullError):
        await arena.put(array, ttl_s=_TTL_S)
    await arena.release(ref)

    assert files_in(tmp_path) == {}
    await arena.close()


async def test_cancelled_copy_leaves_nothing_behind(tmp_path: Path, clock: ManualClock) -> None:
    arena = ArenaConnector(arena_config(tmp_path, quota_bytes=80 * _MB), clock)
    array = np.ones(20 * _MB, np.uint8)
    await arena.release(await arena.put(array, ttl_s=_TTL_S))

    put = asyncio.create_task(arena.put(array, ttl_s=_TTL_S))
    await asyncio.sleep(0)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put

    # The one slot of that size is free again once the thread that writes it has finished.
    async with asyncio.timeout(10):
        while arena.stats().num_tensors == 0:
            with contextlib.suppress(StoreFullError):
                await arena.put(array, ttl_s=_TTL_S)
            await asyncio.sleep(0)
    await arena.close()


async def test_foreign_boot_and_unknown_segment_are_somebody_elses(arena: ArenaConnector) -> None:
    ref = await arena.put(numbers(9), ttl_s=_TTL_S)
    gone = place(ref).segment[:-1] + ("0" if place(ref).segment[-1] != "0" else "1")

    with pytest.raises(SegmentMissingError):
        await arena.get(at(ref, boot_id="other"))
    with pytest.raises(SegmentMissingError):
        await arena.get(at(ref, segment=gone))


@pytest.mark.parametrize(
    "segment", ["../x", "/etc/passwd", "", ".", "a" * 300, "test-0-64k-0", "x\0y", _WELL_NAMED + "\n"]
)
async def test_hostile_segment_name_is_refused(arena: ArenaConnector, segment: str) -> None:
    ref = await arena.put(numbers(9), ttl_s=_TTL_S)

    with pytest.raises(ContractError):
        await arena.get(at(ref, segment=segment))


@pytest.mark.parametrize(
    "changes", [{"slot": -1}, {"slot": 1 << 62}, {"slot": 5}, {"generation": 0}, {"generation": -2}, {"generation": 1}]
)
async def test_hostile_slot_or_generation_is_a_miss(arena: ArenaConnector, changes: dict[str, int]) -> None:
    ref = await arena.put(numbers(9), ttl_s=_TTL_S)

    with pytest.raises(TensorNotFoundError):
        await arena.get(at(ref, **changes))
    assert arena.stats().num_leases == 0


async def test_files_that_are_no_segments_are_never_mapped(arena: ArenaConnector, tmp_path: Path) -> None:
    ref = await arena.put(numbers(9), ttl_s=_TTL_S)
    real = tmp_path / place(ref).segment
    names = [f"test-{'a' * 16}-64k-{digit * 16}" for digit in "0123"]
    (tmp_path / names[0]).write_bytes(b"")
    (tmp_path / names[1]).write_bytes(real.read_bytes()[: 64 * _KB])
    (tmp_path / names[2]).symlink_to(real)
    (tmp_path / names[3]).write_bytes(b"x" * 8192)

    for name in names:
        with pytest.raises(TensorNotFoundError):
            await arena.get(at(ref, segment=name))


async def test_segments_are_private_and_gone_after_close(tmp_path: Path, clock: ManualClock) -> None:
    arena = ArenaConnector(arena_config(tmp_path), clock)
    ref = await arena.put(numbers(9), ttl_s=_TTL_S)
    mode = (tmp_path / place(ref).segment).stat().st_mode

    await arena.close()

    assert stat.S_IMODE(mode) == 0o600
    assert files_in(tmp_path) == {}


async def test_readers_view_outlives_the_owners_close(
    arena: ArenaConnector, tmp_path: Path, clock: ManualClock
) -> None:
    owner = ArenaConnector(arena_config(tmp_path), clock)
    lease = await arena.get(await owner.put(numbers(100), ttl_s=_TTL_S))

    await owner.close()
    arena.sweep(clock.unix_s())

    np.testing.assert_array_equal(lease.array, numbers(100))
    lease.close()


async def test_folder_that_cannot_be_used_is_a_store_error(tmp_path: Path, clock: ManualClock) -> None:
    arena = ArenaConnector(arena_config(tmp_path / "nowhere"), clock)

    with pytest.raises(StoreError):
        await arena.put(numbers(9), ttl_s=_TTL_S)
    await arena.close()


class TestReservation:
    async def test_parts_fit_whatever_others_take_meanwhile(self, arena: ArenaConnector) -> None:
        reservation = await arena.reserve(900 * _KB, ttl_s=10)
        with pytest.raises(StoreFullError):
            while True:
                await arena.put(np.zeros(60 * _KB, np.uint8), ttl_s=_TTL_S)

        parts = [np.full(300 * _KB, i, np.uint8) for i in range(3)]
        refs = [await reservation.put(part, ttl_s=_TTL_S) for part in parts]

        for ref, part in zip(refs, parts, strict=True):
            with await arena.get(ref) as lease:
                np.testing.assert_array_equal(lease.array, part)

    async def test_sixteen_parts_of_any_size_fit(self, arena: ArenaConnector) -> None:
        sizes = [1, 4097, 0, 50_000, 3, 4096, 8191, 12_289, 77, 1, 1, 1, 20_000, 4095, 9, 100_001]
        reservation = await arena.reserve(sum(sizes), ttl_s=10)

        refs = [await reservation.put(np.full(size, i, np.uint8), ttl_s=_TTL_S) for i, size in enumerate(sizes)]

        assert len({place(ref).slot for ref in refs}) == 16
        for i, ref in enumerate(refs):
            with await arena.get(ref) as lease:
                assert (lease.array == i).all()

    async def test_reserve_is_refused_at_once_when_there_is_no_room(self, arena: ArenaConnector) -> None:
        for _ in range(3):
            await arena.reserve(_MB // 2, ttl_s=10)

        with pytest.raises(StoreFullError):
            await arena.reserve(_MB // 2, ttl_s=10)

    async def test_cancel_gives_the_room_back(self, arena: ArenaConnector) -> None:
        reservations = [await arena.reserve(_MB // 2, ttl_s=10) for _ in range(3)]

        for _ in range(2):
            await reservations[0].cancel()

        await arena.reserve(_MB // 2, ttl_s=10)
        with pytest.raises(StoreFullError):
            await reservations[0].put(numbers(9), ttl_s=_TTL_S)

    async def test_cancel_keeps_what_was_put_until_it_is_released(self, arena: ArenaConnector) -> None:
        reservation = await arena.reserve(_MB // 2, ttl_s=10)
        refs = [await reservation.put(numbers(5000) + i, ttl_s=_TTL_S) for i in range(2)]
        await reservation.cancel()

        await arena.release(refs[0])
        with await arena.get(refs[1]) as lease:
            np.testing.assert_array_equal(lease.array, numbers(5000) + 1)
        await arena.release(refs[1])

        assert arena.stats().num_tensors == 0
        for _ in range(3):
            await arena.reserve(_MB // 2, ttl_s=10)

    async def test_forgotten_reservation_expires(self, arena: ArenaConnector, clock: ManualClock) -> None:
        for _ in range(3):
            await arena.reserve(_MB // 2, ttl_s=10)
        await clock.advance(11)

        arena.sweep(clock.unix_s())

        await arena.reserve(_MB // 2, ttl_s=10)

    async def test_more_than_was_reserved_is_refused(self, arena: ArenaConnector) -> None:
        reservation = await arena.reserve(100, ttl_s=10)

        with pytest.raises(StoreFullError):
            await reservation.put(np.zeros(101, np.uint8), ttl_s=_TTL_S)
        await reservation.put(np.zeros(100, np.uint8), ttl_s=_TTL_S)

    async def test_known_parts_take_a_slot_each_whatever_their_order(self, arena: ArenaConnector) -> None:
        sizes = [60 * _KB, _MB, 10, 20 * _KB, 64 * _KB]
        reservation = await arena.reserve(sum(sizes), ttl_s=10, part_bytes=sizes)
        with pytest.raises(StoreFullError):
            while True:
                await arena.put(np.zeros(60 * _KB, np.uint8), ttl_s=_TTL_S)

        refs = [await reservation.put(np.full(size, size % 251, np.uint8), ttl_s=_TTL_S) for size in sorted(sizes)]

        for ref in refs:
            with await arena.get(ref) as lease:
                assert (lease.array == ref.nbytes % 251).all()

    async def test_refused_reservation_holds_nothing(self, arena: ArenaConnector) -> None:
        with pytest.raises(StoreFullError):
            await arena.reserve(8 * _MB, ttl_s=10, part_bytes=[_MB] * 8)

        for _ in range(3):
            await arena.reserve(_MB // 2, ttl_s=10)


async def test_leases_may_be_closed_in_any_thread(arena: ArenaConnector) -> None:
    ref = await arena.put(numbers(1000), ttl_s=_TTL_S)

    async def read() -> None:
        for _ in range(50):
            lease = await arena.get(ref)
            await asyncio.to_thread(lease.close)

    await asyncio.gather(*(read() for _ in range(8)))

    assert arena.stats().num_leases == 0
    await arena.release(ref)
    assert arena.stats().num_tensors == 0


async def test_a_segment_removed_by_somebody_is_given_up_and_later_tensors_can_be_read(
    arena: ArenaConnector, tmp_path: Path
) -> None:
    lost = await arena.put(numbers(100), ttl_s=_TTL_S)
    remove_all_in(tmp_path)

    fresh = await arena.put(numbers(100) + 1, ttl_s=_TTL_S)
    reader = ArenaConnector(arena_config(tmp_path), ManualClock())

    with await reader.get(fresh) as lease:
        np.testing.assert_array_equal(numbers(100) + 1, lease.array)
    with pytest.raises(TensorNotFoundError):
        await reader.get(lost)
    await arena.release(lost)
    assert arena.stats().num_tensors == 1
    await reader.close()


async def test_a_sweep_notices_a_removed_segment_and_a_reservation_in_it_refuses(
    arena: ArenaConnector, tmp_path: Path, clock: ManualClock
) -> None:
    reservation = await arena.reserve(1000, ttl_s=_TTL_S)
    remove_all_in(tmp_path)

    arena.sweep(clock.unix_s())

    with pytest.raises(StoreFullError):
        await reservation.put(numbers(10), ttl_s=_TTL_S)
    await reservation.cancel()
    assert arena.stats().num_tensors == 0
