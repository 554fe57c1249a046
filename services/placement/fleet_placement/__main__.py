"""`python -m fleet_placement`: one placement instance; the one with the lease leads."""

from __future__ import annotations

import uvloop

from fleet_common.logging import setup_logging
from fleet_common.settings import CommonSettings
from fleet_common.telemetry.tracing import setup_tracing
from fleet_placement.app import serve
from fleet_placement.settings import PlacementSettings


def main() -> None:
    """Serve until told to stop."""
    common = CommonSettings()
    settings = PlacementSettings()  # type: ignore[call-arg]
    setup_logging(common.telemetry, "placement")
    setup_tracing(common.telemetry, "placement")
    uvloop.run(serve(common, settings))


if __name__ == "__main__":
    main()
