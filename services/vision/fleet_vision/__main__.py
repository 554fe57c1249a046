"""`python -m fleet_vision`: one vision worker."""

from __future__ import annotations

from fleet_common.settings import CommonSettings
from fleet_common.stage.host import run_worker
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import Stage
from fleet_vision.app import build_engine
from fleet_vision.settings import VisionSettings


def main() -> None:
    """Serve until told to stop."""
    settings = VisionSettings()  # type: ignore[call-arg]
    metrics = WorkerMetrics()
    run_worker(CommonSettings(), settings, Stage.VISION_ENCODE, build_engine(settings, metrics), metrics=metrics)


if __name__ == "__main__":
    main()
