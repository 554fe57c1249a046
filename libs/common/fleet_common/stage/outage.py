"""Waiting out a dependency: back-off while the caller's work is kept alive by heartbeats, never a nak."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from fleet_common.clock import Clock
from fleet_common.errors import (
    BusError,
    CancelledWorkError,
    DeadlineExceededError,
    DependencyError,
    NoResponderError,
    QueueFullError,
    RevisionConflictError,
    StoreError,
    StoreFullError,
)

log = structlog.get_logger(__name__)

R = TypeVar("R")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


def is_outage(error: DependencyError) -> bool:
    """Whether the error says that a dependency is out of reach, rather than full or without a listener."""
    if isinstance(error, NoResponderError | QueueFullError | RevisionConflictError | StoreFullError):
        return False
    return isinstance(error, BusError | StoreError)


class Outage:
    """Counts the operations that wait for a dependency right now; while there are any, the worker pulls nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_waiting = 0
        self._on_change: Callable[[], None] = lambda: None

    @property
    def is_out(self) -> bool:
        """True while some operation waits for the bus or the store to come back."""
        return self._num_waiting > 0

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call when `is_out` changes."""
        self._on_change = callback

    async def persist(
        self,
        operation: Callable[[], Awaitable[R]],
        *,
        until_unix_s: float,
        is_over: Callable[[], bool],
        pauses: bool = True,
    ) -> R:
        """Run an operation until it succeeds.

        Args:
            pauses: a failure means that the worker should pull no more work; false where it concerns one peer only.
        Raises:
            DeadlineExceededError: `until_unix_s` passed; the operation was tried at least once.
            CancelledWorkError: `is_over()` became true while waiting.
        """
        pause_s = _FIRST_PAUSE_S
        is_waiting = False
        try:
            while True:
                try:
                    return await operation()
                except DependencyError as error:
                    left_s = until_unix_s - self._clock.unix_s()
                    if left_s <= 0:
                        raise DeadlineExceededError("a dependency stayed away until the deadline") from error
                    if pauses and is_outage(error) and not is_waiting:
                        is_waiting = True
                        self._enter(error)
                    await self._clock.sleep(min(pause_s, left_s))
                    pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                if is_over():
                    raise CancelledWorkError("over while waiting for a dependency")
        finally:
            if is_waiting:
                self._leave()

    def _enter(self, error: DependencyError) -> None:
        self._num_waiting += 1
        if self._num_waiting == 1:
            log.warning("dependency_lost", code=error.code, reason=str(error))
            self._on_change()

    def _leave(self) -> None:
        self._num_waiting -= 1
        if self._num_waiting == 0:
            log.info("dependency_wait_ended")
            self._on_change()
