"""Reach into a running stack as its operator could, with the stack's own secrets."""

from __future__ import annotations

from pathlib import Path

import redis

from fleet_cli.testing import RunningFleet
from fleet_cli.up.rundir import RunDir


def network_store(fleet: RunningFleet) -> redis.Redis:
    """The server of the stack's network store."""
    secrets, port = RunDir(fleet.run_dir).read_secrets(), fleet.stack()["processes"]["valkey-server"]["port"]
    return redis.Redis(port=port, password=secrets.store)


def flush_store(fleet: RunningFleet) -> None:
    """Empty the network store and every arena segment: all refs miss from now on."""
    with network_store(fleet) as store:
        store.flushall()
    for segment in Path("/dev/shm").glob(f"{RunDir(fleet.run_dir).namespace}*"):
        segment.unlink(missing_ok=True)
