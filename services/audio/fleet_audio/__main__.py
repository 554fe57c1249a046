"""`python -m fleet_audio`: one worker that transcribes, or one that speaks."""

from __future__ import annotations

from fleet_audio.app import build_engine
from fleet_audio.settings import AudioSettings
from fleet_common.settings import CommonSettings
from fleet_common.stage.host import run_worker
from fleet_contracts.base import Stage


def main() -> None:
    """Serve until told to stop."""
    settings = AudioSettings()  # type: ignore[call-arg]
    run_worker(CommonSettings(), settings, Stage(settings.stage), build_engine(settings))


if __name__ == "__main__":
    main()
