"""`python -m fleet_decode`: one decode worker."""


def main() -> None:
    """Serve until told to stop; does not return."""
    # Imported here: vLLM's engine core is started by multiprocessing, which imports this module again.
    from fleet_common.settings import CommonSettings
    from fleet_common.stage.host import run_worker
    from fleet_common.stage.leaving import run_and_leave
    from fleet_contracts.base import Stage
    from fleet_decode.app import build_engine
    from fleet_decode.settings import DecodeSettings

    settings = DecodeSettings()  # type: ignore[call-arg]
    run_and_leave(lambda: run_worker(CommonSettings(), settings, Stage.DECODE, build_engine(settings)))


if __name__ == "__main__":
    main()
