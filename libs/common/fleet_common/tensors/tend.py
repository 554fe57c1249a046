"""The store's housekeeping, run beside whatever a process does."""

from __future__ import annotations

from fleet_common.clock import Clock
from fleet_common.tensors.router import FleetTensorStore

_SWEEP_S = 1.0
_SWEEPS_PER_REAP = 10


async def tend(store: FleetTensorStore, clock: Clock) -> None:
    """Free what expired or was released by readers each second, segments of the dead every ten; until cancelled."""
    num_sweeps = 0
    while True:
        await clock.sleep(_SWEEP_S)
        now_unix_s = clock.unix_s()
        store.sweep(now_unix_s)
        num_sweeps += 1
        if num_sweeps % _SWEEPS_PER_REAP == 0:
            await store.reap(now_unix_s)
