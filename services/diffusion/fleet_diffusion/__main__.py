"""`python -m fleet_diffusion`: one diffusion worker."""

from __future__ import annotations

from fleet_common.settings import CommonSettings
from fleet_common.stage.host import run_worker
from fleet_common.stage.leaving import run_and_leave
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import Stage
from fleet_diffusion.app import build_engine
from fleet_diffusion.settings import DiffusionSettings


def main() -> None:
    """Serve until told to stop; does not return."""
    settings = DiffusionSettings()  # type: ignore[call-arg]
    metrics = WorkerMetrics()
    engine = build_engine(settings, metrics)
    run_and_leave(lambda: run_worker(CommonSettings(), settings, Stage.DIFFUSION_GENERATE, engine, metrics=metrics))


if __name__ == "__main__":
    main()
