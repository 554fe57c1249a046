"""Where a command finds the fleet: the run folder of a local stack, or the settings in the environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleet_cli.up.rundir import RunDir
from fleet_cli.up.settings import UpSettings
from fleet_common.settings import BusSettings, CommonSettings


@dataclass(frozen=True, slots=True)
class Target:
    """The fleet a command speaks to, in the role `admin`."""

    bus: BusSettings
    url: str = ""


def find_fleet(run_dir: Path | None) -> Target:
    """The stack in `run_dir` (default: `FLEET_RUN_DIR` or .fleet), else what `FLEET_BUS__*` names.

    Raises:
        CliError: neither is there.
    """
    common = CommonSettings()
    if run_dir is None and common.bus.work_password.get_secret_value():
        return Target(bus=common.bus)
    folder = RunDir(run_dir or UpSettings().run_dir)  # type: ignore[call-arg]
    stack = folder.read_stack()
    secrets = folder.read_secrets()
    bus = BusSettings(
        url=stack["bus_url"],
        user="admin",
        work_password=secrets.bus["admin"],  # type: ignore[arg-type]
        control_password=secrets.bus["admin_control"],  # type: ignore[arg-type]
    )  # type: ignore[call-arg]
    return Target(bus=bus, url=stack["url"])
