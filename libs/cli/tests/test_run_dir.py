"""What a run folder keeps from one stack to the next."""

from __future__ import annotations

from pathlib import Path

from fleet_cli.up.rundir import RunDir
from fleet_common.bus.topology import TopologyLimits, durable_streams, streams


def test_files_and_jobs_outlive_a_stack_and_nothing_else_does(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    for stream in streams(TopologyLimits()):
        (tmp_path / "jetstream" / "jetstream" / stream.account.value / "streams" / stream.name).mkdir(parents=True)

    folder.clean()

    kept = {path.name for path in (tmp_path / "jetstream").glob("jetstream/*/streams/*")}
    assert kept == durable_streams() == {"KV_fleet_jobs", "KV_fleet_lines", "OBJ_fleet_files", "OBJ_fleet_pictures"}
