"""`python -m fleet_preprocess`: one preprocess worker."""

from __future__ import annotations

from fleet_common.settings import CommonSettings
from fleet_common.stage.host import run_worker
from fleet_contracts.base import Stage
from fleet_preprocess.app import build_engine
from fleet_preprocess.settings import PreprocessSettings


def main() -> None:
    """Serve until told to stop."""
    settings = PreprocessSettings()  # type: ignore[call-arg]
    run_worker(CommonSettings(), settings, Stage.PREPROCESS, build_engine(settings))


if __name__ == "__main__":
    main()
