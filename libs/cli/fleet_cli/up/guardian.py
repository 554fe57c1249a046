"""Outlives a supervisor that was killed: ends its stack's processes and removes their shared memory.

`python -m fleet_cli.up.guardian <run dir>`, started by the supervisor with a pipe as standard input. A word on the
pipe means a good end; the end of the pipe without one means that the supervisor is dead.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from fleet_cli.errors import CliError
from fleet_cli.up.rundir import RunDir

GOOD_BYE = b"bye\n"
_LOCK_TIMEOUT_S = 5.0


def main() -> None:
    """Wait for the end of the pipe, then clean up if need be."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == GOOD_BYE:
        return
    run_dir = RunDir(Path(sys.argv[1]))
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with run_dir.locked():
                run_dir.clean()
                return
        except CliError:
            # The kernel has not let go of the dead supervisor's lock yet, or its successor does the cleaning.
            time.sleep(0.1)


if __name__ == "__main__":
    main()
