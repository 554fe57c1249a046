"""Random lives of an arena: whatever the order, a live reference reads its own bytes and room is never lost."""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_common.errors import StoreFullError, TensorNotFoundError
from fleet_common.tensors.arena import ArenaConnector, ArenaReservation
from fleet_common.tensors.port import Lease
from fleet_common.testing.clock import ManualClock
from fleet_common.testing.tensors import arena_config, files_in
from fleet_contracts.tensors import TensorRef

_QUOTA_BYTES = 6 << 20
_SIZES = (0, 1, 5000, 65_536, 65_537, 400_000, 1 << 20)


@dataclass
class Walk:
    """An arena, a second process on the host, and what should be in there (reference -> the byte it is full of)."""

    arena: ArenaConnector
    reader: ArenaConnector
    clock: ManualClock
    chance: random.Random
    live: dict[TensorRef, int] = field(default_factory=dict)
    gone: list[TensorRef] = field(default_factory=list)
    leases: list[tuple[Lease, int]] = field(default_factory=list)
    reservations: list[tuple[ArenaReservation, int]] = field(default_factory=list)

    async def put(self) -> None:
        array = np.full(self.chance.choice(_SIZES), self.chance.randrange(256), np.uint8)
        ttl_s = self.chance.choice((3.0, 1000.0))
        try:
            ref = await self.arena.put(array, ttl_s=ttl_s)
        except StoreFullError:
            return
        self.live[ref] = int(array[0]) if array.size else 0

    async def reserve(self) -> None:
        nbytes = self.chance.choice(_SIZES[:-1])
        try:
            self.reservations.append((await self.arena.reserve(nbytes, ttl_s=1000.0), nbytes))
        except StoreFullError:
            return

    async def fill_reservation(self) -> None:
        if self.reservations:
            reservation, nbytes = self.reservations.pop()
            for part_bytes in (nbytes // 3, nbytes - nbytes // 3):
                array = np.full(part_bytes, 9, np.uint8)
                self.live[await reservation.put(array, ttl_s=1000.0)] = 9
            await reservation.cancel()

    async def release(self) -> None:
        if self.live:
            ref = self.chance.choice(list(self.live))
            del self.live[ref]
            self.gone.append(ref)
            await self.chance.choice((self.arena, self.reader)).release(ref)

    async def lease(self) -> None:
        if self.live:
            ref = self.chance.choice(list(self.live))
            self.leases.append((await self.chance.choice((self.arena, self.reader)).get(ref), self.live[ref]))

    async def close_lease(self) -> None:
        if self.leases:
            self.leases.pop(self.chance.randrange(len(self.leases)))[0].close()

    async def pass_time(self) -> None:
        await self.clock.advance(2.0)
        now_unix_s = self.clock.unix_s()
        self.arena.sweep(now_unix_s)
        self.gone += [ref for ref in self.live if ref.expires_unix_s <= now_unix_s]
        self.live = {ref: byte for ref, byte in self.live.items() if ref.expires_unix_s > now_unix_s}

    async def check(self, folder: Path) -> None:
        for ref, byte in self.live.items():
            with await self.reader.get(ref) as lease:
                assert (lease.array == byte).all()
        for opened, byte in self.leases:
            assert (opened.array == byte).all()
        assert sum(files_in(folder).values()) <= _QUOTA_BYTES

    async def end(self) -> None:
        """Let everything go: all of the arena must be free again."""
        for opened, _ in self.leases:
            opened.close()
        for reservation, _ in self.reservations:
            await reservation.cancel()
        self.gone += self.live
        for ref in self.live:
            await self.arena.release(ref)
        self.arena.sweep(self.clock.unix_s())
        for ref in self.gone:
            try:
                await self.arena.get(ref)
            except TensorNotFoundError:
                continue
            raise AssertionError("a freed tensor could be opened")
        assert self.arena.stats().num_tensors == 0
        for _ in range(5):
            await self.arena.put(np.zeros(1 << 20, np.uint8), ttl_s=1000.0)


async def _walk(seed: int, folder: Path) -> None:
    clock = ManualClock()
    arena, reader = (ArenaConnector(arena_config(folder, quota_bytes=_QUOTA_BYTES), clock) for _ in range(2))
    walk = Walk(arena, reader, clock, random.Random(seed))
    moves = [walk.put] * 4 + [walk.release] * 2 + [walk.lease, walk.close_lease] * 2
    moves += [walk.reserve, walk.fill_reservation, walk.pass_time]
    for step in range(80):
        await walk.chance.choice(moves)()
        if step % 20 == 0:
            await walk.check(folder)
    await walk.check(folder)
    await walk.end()
    for connector in (reader, arena):
        await connector.close()
    assert files_in(folder) == {}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_live_tensors_read_true_and_room_comes_back(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_walk(seed, Path(folder)))
