"""A thread of its own for work that must not hold up the loop, nor the end of the process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class DaemonThread:
    """Runs one call after the other until `stop`.

    Not a `ThreadPoolExecutor`: the interpreter waits for such a pool's threads at exit, also for one that imports or
    loads a model for half a minute.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], _T]) -> _T:
        """The call's result. Cancelling the wait does not end a call that runs."""
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Let the thread end once it has done what it was given. Idempotent."""
        self._calls.put(None)

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the call
                future.set_exception(error)
            del future, call, entry
