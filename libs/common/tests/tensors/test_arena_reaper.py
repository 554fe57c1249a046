"""Leftovers of dead owners go; whatever the living own or read stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_common.errors import TensorNotFoundError
from fleet_common.settings import StoreSettings
from fleet_common.tensors import layout
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.layout import Geometry
from fleet_common.tensors.leases import LeaseTable
from fleet_common.tensors.reaper import reap
from fleet_common.tensors.segment import Descriptor, OwnedSegment
from fleet_common.tensors.spec import spec_of_array
from fleet_common.testing.clock import ManualClock
from fleet_common.testing.tensor_conformance import numbers
from fleet_common.testing.tensors import files_in
from fleet_contracts.tensors import ArenaPlace, TensorRef

_OWNER = "a" * 16
_GEOMETRY = Geometry(num_slots=2, slot_bytes=64 << 10)


class Owner:
    """A process with one segment and one tensor in it, which can die."""

    def __init__(self, folder: Path, *, namespace: str = "test", owner: str = _OWNER, expires_unix_s: float) -> None:
        self.path = folder / layout.new_segment_name(namespace, owner, _GEOMETRY.slot_bytes)
        self._segment = OwnedSegment.create(folder, self.path.name, _GEOMETRY)
        spec = spec_of_array(numbers(9), None)
        self._segment.view(0, 0, spec)[:] = numbers(9)
        generation = self._segment.commit(0, Descriptor.of(spec, 0, expires_unix_s))
        place = ArenaPlace(boot_id="boot", segment=self.path.name, slot=0, generation=generation)
        self.ref = TensorRef(place=place, dtype="float32", shape=(9,), nbytes=36)
        self.place = place
        self.touched_unix_s = self.path.stat().st_mtime

    def die(self) -> None:
        """Lose the claim and leave the file behind, as a killed process does."""
        spare = self.path.with_suffix(".spare")
        os.link(self.path, spare)
        self._segment.unlink()
        os.link(spare, self.path)
        spare.unlink()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    yield Owner(tmp_path, expires_unix_s=4e9)


def test_living_owner_is_never_reaped(owner: Owner, tmp_path: Path) -> None:
    report = reap(tmp_path, "test", 0.0, 9e9)

    assert (report.segments, owner.path.exists()) == ((), True)


def test_dead_owners_tensors_stay_for_the_grace(owner: Owner, tmp_path: Path) -> None:
    owner.die()

    within = reap(tmp_path, "test", 60.0, owner.touched_unix_s + 59)
    after = reap(tmp_path, "test", 60.0, owner.touched_unix_s + 61)

    assert within.segments == ()
    assert after.segments == (owner.path.name,)
    assert after.freed_bytes == _GEOMETRY.total_bytes


def test_dead_owner_without_live_tensors_goes_at_once(tmp_path: Path) -> None:
    owner = Owner(tmp_path, expires_unix_s=1_000.0)
    owner.die()

    report = reap(tmp_path, "test", 600.0, owner.touched_unix_s)

    assert report.segments == (owner.path.name,)


def test_leased_segment_stays_until_the_reader_is_done(owner: Owner, tmp_path: Path) -> None:
    table = LeaseTable(tmp_path)
    lease = table.open(owner.ref, owner.place, 0.0)
    owner.die()

    held = reap(tmp_path, "test", 0.0, owner.touched_unix_s + 1)
    assert (held.segments, lease.array[3]) == ((), 3.0)

    lease.close()
    assert reap(tmp_path, "test", 0.0, owner.touched_unix_s + 1).segments == (owner.path.name,)
    table.sweep()
    with pytest.raises(TensorNotFoundError):
        table.open(owner.ref, owner.place, 0.0)


def test_half_made_segment_goes(tmp_path: Path) -> None:
    path = tmp_path / layout.new_segment_name("test", _OWNER, 64 << 10)
    path.write_bytes(b"")

    assert reap(tmp_path, "test", 600.0, path.stat().st_mtime).segments == (path.name,)


def test_other_namespaces_and_strangers_are_left_alone(tmp_path: Path) -> None:
    other = Owner(tmp_path, namespace="test-two", expires_unix_s=0.0)
    other.die()
    for name in ("test-notes.txt", "test-", "unrelated"):
        (tmp_path / name).write_bytes(b"keep")
    (tmp_path / f"test-{_OWNER}-64k-{'0' * 16}").symlink_to(tmp_path / "unrelated")

    assert reap(tmp_path, "test", 0.0, 9e9).segments == ()
    assert reap(tmp_path, "test-two", 0.0, 9e9).segments == (other.path.name,)


def test_owner_filter_takes_only_its_own(tmp_path: Path) -> None:
    mine = Owner(tmp_path, owner="b" * 16, expires_unix_s=4e9)
    others = Owner(tmp_path, owner="c" * 16, expires_unix_s=4e9)
    for owner in (mine, others):
        owner.die()

    report = reap(tmp_path, "test", 0.0, mine.touched_unix_s, owner="b" * 16)

    assert (report.segments, others.path.exists()) == ((mine.path.name,), True)


async def test_store_sweeps_what_its_predecessor_left_at_start(tmp_path: Path) -> None:
    settings = StoreSettings(arena_dir=tmp_path, arena_namespace="test")  # type: ignore[call-arg]
    clock = ManualClock()
    first = await open_store(settings, owner="decode-0", clock=clock)
    assert first.arena is not None
    owner = Owner(tmp_path, owner=first.arena.config.owner, expires_unix_s=4e9)
    other = Owner(tmp_path, expires_unix_s=4e9)
    owner.die()
    other.die()
    await first.close()

    second = await open_store(settings, owner="decode-0", clock=clock)

    assert list(files_in(tmp_path)) == [other.path.name]
    await second.close()
