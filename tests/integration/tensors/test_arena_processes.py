"""The arena under kill -9, between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleet_common.errors import StoreFullError, TensorNotFoundError
from fleet_common.settings import StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.reaper import reap
from fleet_common.tensors.router import FleetTensorStore
from fleet_common.testing.tensors import files_in
from fleet_contracts import codec
from fleet_contracts.tensors import ArenaPlace, TensorRef

pytestmark = pytest.mark.integration

_PEER = Path(__file__).with_name("arena_peer.py")
_TTL_S = 600.0
_MB = 1 << 20


class Peer:
    """A process of `arena_peer.py`."""

    def __init__(self, role: str, folder: Path, *, owner: str = "", quota_bytes: int = 32 * _MB) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PEER), role, str(folder), owner, str(quota_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self.line() != "ready":  # log lines of the store come first
            pass

    def line(self) -> str:
        """Next line; AssertionError when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the peer ended early"
        return line

    def ref(self) -> TensorRef:
        return _decode(self.line())

    def hold(self, ref: TensorRef) -> None:
        """Make it lease a tensor."""
        assert self._process.stdin is not None
        self._process.stdin.write(codec.encode(ref).hex() + "\n")
        self._process.stdin.flush()
        assert self.line() == "held"

    def kill(self) -> list[TensorRef]:
        """SIGKILL; returns what it had printed and nobody had read."""
        self._process.send_signal(signal.SIGKILL)
        assert self._process.stdout is not None and self._process.stdin is not None
        rest = [line for line in self._process.stdout.read().split("\n")[:-1] if line not in ("full", "held")]
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(10)
        return [_decode(line) for line in rest]


def _decode(line: str) -> TensorRef:
    return msgspec.msgpack.decode(bytes.fromhex(line), type=TensorRef)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    """Peers to be killed whatever happens."""
    started: list[Peer] = []
    yield started
    for peer in started:
        with contextlib.suppress(ValueError):  # killed already
            peer.kill()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FleetTensorStore]:
    settings = StoreSettings(  # type: ignore[call-arg]
        arena_dir=tmp_path, arena_namespace="fault", arena_bytes=24 * _MB, shm_threshold_bytes=0
    )
    made = await open_store(settings)
    yield made
    await made.close()


async def _number_in(store: FleetTensorStore, ref: TensorRef) -> int | None:
    """The number a `write` peer filled the tensor with; None = miss. A mix of numbers would be a torn read."""
    try:
        lease = await store.get(ref)
    except TensorNotFoundError:
        return None
    with lease:
        low, high = int(lease.array.min()), int(lease.array.max())
    assert low == high, "torn read"
    return low


async def test_killed_reader_gives_its_lease_back(store: FleetTensorStore, tmp_path: Path, peers: list[Peer]) -> None:
    ref = await store.put(np.ones(_MB, np.uint8), ttl_s=_TTL_S, locality=store.locality)
    peers.append(await asyncio.to_thread(Peer, "hold", tmp_path))
    await asyncio.to_thread(peers[0].hold, ref)
    await store.release(ref)
    store.sweep(time.time())
    assert store.stats()["arena"].num_tensors == 1

    await asyncio.to_thread(peers[0].kill)
    store.sweep(time.time())

    assert store.stats()["arena"].num_tensors == 0


async def test_readers_see_whole_tensors_or_misses_while_slots_are_reused_and_the_writer_dies(
    store: FleetTensorStore, tmp_path: Path, peers: list[Peer]
) -> None:
    peers.append(await asyncio.to_thread(Peer, "write", tmp_path))
    numbers = []
    for expected in range(1, 60):
        ref = await asyncio.to_thread(peers[0].ref)
        numbers.append((expected, await _number_in(store, ref)))

    unread = await asyncio.to_thread(peers[0].kill)
    last = [await _number_in(store, ref) for ref in unread[-3:]]

    assert all(number in (expected, None) for expected, number in numbers)
    # What a dead producer had finished stays readable.
    assert all(number is not None for number in last)


async def test_stale_reference_is_detected_after_its_slot_was_reused(
    store: FleetTensorStore, tmp_path: Path, peers: list[Peer]
) -> None:
    peers.append(await asyncio.to_thread(Peer, "write", tmp_path))
    refs = [await asyncio.to_thread(peers[0].ref) for _ in range(12)]
    first = refs[0]

    reused = [ref for ref in refs[1:] if _slot(ref) == _slot(first)]

    assert reused
    assert await _number_in(store, first) is None


async def test_writer_killed_in_the_middle_of_a_put_leaves_nothing_that_can_be_read(
    store: FleetTensorStore, tmp_path: Path, peers: list[Peer]
) -> None:
    peers.append(await asyncio.to_thread(Peer, "big", tmp_path, quota_bytes=80 * _MB))
    # With the second reference printed the first has been released.
    refs = [await asyncio.to_thread(peers[0].ref) for _ in range(2)]
    await asyncio.sleep(0.013)

    refs += await asyncio.to_thread(peers[0].kill)

    for ref in refs[:-1]:
        with pytest.raises(TensorNotFoundError):
            await store.get(ref)
    with contextlib.suppress(TensorNotFoundError), await store.get(refs[-1]) as lease:
        assert (lease.array == 1).all()


async def test_leftovers_go_after_the_grace_unless_leased_and_never_a_live_peers(
    store: FleetTensorStore, tmp_path: Path, peers: list[Peer]
) -> None:
    peers += [await asyncio.to_thread(Peer, "flood", tmp_path, quota_bytes=4 * _MB) for _ in range(2)]
    dead, live = [await asyncio.to_thread(peer.ref) for peer in peers]
    lease = await store.get(dead)
    await asyncio.to_thread(peers[0].kill)
    now_unix_s = time.time()

    within_grace = reap(tmp_path, "fault", 60.0, now_unix_s)
    while_leased = reap(tmp_path, "fault", 60.0, now_unix_s + 120)
    lease.close()
    after = reap(tmp_path, "fault", 60.0, now_unix_s + 120)

    assert within_grace.segments == ()
    assert _segment(dead) not in while_leased.segments
    assert _segment(dead) in after.segments
    assert _segment(live) not in while_leased.segments + after.segments
    assert await _number_in(store, live) == 1
    store.sweep(time.time())
    assert await _number_in(store, dead) is None


async def test_full_arena_refuses_and_overwrites_nothing(
    store: FleetTensorStore, tmp_path: Path, peers: list[Peer]
) -> None:
    peers.append(await asyncio.to_thread(Peer, "flood", tmp_path, quota_bytes=20 * _MB))
    refs = []
    while (line := await asyncio.to_thread(peers[0].line)) != "full":
        refs.append(_decode(line))

    found = [await _number_in(store, ref) for ref in refs]

    assert found == list(range(1, len(refs) + 1))
    assert len(refs) >= 16
    assert sum(files_in(tmp_path).values()) <= 20 * _MB


async def test_twenty_kills_leave_the_folder_as_it_was(shm: Path, peers: list[Peer]) -> None:
    """Case C13: every start of a worker sweeps what its last run left; a live peer is never touched."""
    peers.append(await asyncio.to_thread(Peer, "flood", shm, owner="peer", quota_bytes=4 * _MB))
    live = await asyncio.to_thread(peers[0].ref)
    while await asyncio.to_thread(peers[0].line) != "full":
        pass
    baseline = files_in(shm)

    for _ in range(20):
        writer = await asyncio.to_thread(Peer, "write", shm, owner="encode-0", quota_bytes=24 * _MB)
        peers.append(writer)
        for _ in range(3):
            await asyncio.to_thread(writer.ref)
        await asyncio.to_thread(writer.kill)
        assert len(files_in(shm)) == len(baseline) + 1
    settings = _settings(shm)
    last = await open_store(settings, owner="encode-0")

    assert files_in(shm) == baseline
    assert await _number_in(last, live) == 1
    await last.close()


async def test_start_works_in_a_folder_that_the_dead_have_filled(small_shm: Path, peers: list[Peer]) -> None:
    peers.append(await asyncio.to_thread(Peer, "flood", small_shm, quota_bytes=1024 * _MB))
    while await asyncio.to_thread(peers[0].line) != "full":
        pass
    await asyncio.to_thread(peers[0].kill)

    store = await open_store(_settings(small_shm))
    ref = await store.put(np.full(_MB, 7, np.uint8), ttl_s=_TTL_S, locality=store.locality)

    with await store.get(ref) as lease:
        assert (lease.array == 7).all()
    await store.close()


async def test_folder_that_the_living_have_filled_refuses_cleanly(small_shm: Path, peers: list[Peer]) -> None:
    """posix_fallocate says so; without it the first write would end the process with SIGBUS."""
    (small_shm / "ballast").write_bytes(b"x" * (63 * _MB + 512 * 1024))
    store = await open_store(_settings(small_shm))

    with pytest.raises(StoreFullError):
        await store.put(np.zeros(4 * _MB, np.uint8), ttl_s=_TTL_S, locality=store.locality)

    assert set(files_in(small_shm)) == {"ballast"}
    await store.close()


async def test_smaller_segment_is_made_when_the_folder_has_room_for_no_more(small_shm: Path) -> None:
    (small_shm / "ballast").write_bytes(b"x" * (52 * _MB))
    store = await open_store(_settings(small_shm))

    ref = await store.put(np.full(8 * _MB, 3, np.uint8), ttl_s=_TTL_S, locality=store.locality)

    with await store.get(ref) as lease:
        assert (lease.array == 3).all()
    await store.close()


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MB, like Docker's /dev/shm. Only root can mount one."""
    folder = tmp_path / "shm"
    folder.mkdir()
    refusal = _mount(folder)
    if refusal:
        pytest.skip(f"a tmpfs cannot be mounted here: {refusal}")
    yield folder
    _unmount(folder)


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MB, a plain folder where none can be mounted."""
    folder = tmp_path / "shm"
    folder.mkdir()
    refusal = _mount(folder)
    yield folder
    if not refusal:
        _unmount(folder)


def _mount(folder: Path) -> str:
    """Why not, or ""."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or "refused"


def _unmount(folder: Path) -> None:
    # Lazily: a peer that is being killed may still have it open.
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _settings(folder: Path) -> StoreSettings:
    return StoreSettings(  # type: ignore[call-arg]
        arena_dir=folder, arena_namespace="fault", arena_bytes=256 * _MB, shm_threshold_bytes=0
    )


def _slot(ref: TensorRef) -> tuple[str, int]:
    assert isinstance(ref.place, ArenaPlace)
    return ref.place.segment, ref.place.slot


def _segment(ref: TensorRef) -> str:
    return _slot(ref)[0]
