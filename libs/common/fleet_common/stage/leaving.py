"""The end of a worker process that holds torch."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(serve: Callable[[], None]) -> NoReturn:
    """Serve, then end the process at once: taking torch apart module by module takes seconds, and so may a step that a
    thread is still in. `serve` has closed everything; what was registered to run at exit runs.
    """
    status = 0
    try:
        serve()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
