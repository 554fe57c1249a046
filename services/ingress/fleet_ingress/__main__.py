"""`python -m fleet_ingress`: one ingress."""

from __future__ import annotations

import uvloop

from fleet_common.logging import setup_logging
from fleet_common.settings import CommonSettings
from fleet_common.telemetry.tracing import setup_tracing
from fleet_ingress.lifecycle import run_ingress
from fleet_ingress.settings import IngressSettings


def main() -> None:
    """Serve until told to stop."""
    common = CommonSettings()
    settings = IngressSettings()  # type: ignore[call-arg]
    setup_logging(common.telemetry, "ingress")
    setup_tracing(common.telemetry, "ingress")
    uvloop.run(run_ingress(common, settings))


if __name__ == "__main__":
    main()
