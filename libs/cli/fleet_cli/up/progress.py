"""What `fleet up` shows: plain lines, and on a terminal one more that says what is being waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

#: On a pipe, how often a wait is mentioned again.
_REPEAT_S = 15.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something not ready yet.

    Attributes:
        detail: what it does, like `loading weights`.
        waited_s: since it was started.
    """

    name: str
    detail: str
    waited_s: float


def describe(waiting: list[Waiting]) -> str:
    """`waiting for decode-0 (loading weights, 12 s), ingress (...)`."""
    parts = [f"{entry.name} ({entry.detail.rstrip('.')}, {entry.waited_s:.0f} s)" for entry in waiting]
    return f"waiting for {', '.join(parts)}"


class Progress:
    """Lines for people."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._told: tuple[str, ...] = ()
        self._told_s = 0.0

    def line(self, text: str) -> None:
        """Say one thing."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def waiting(self, entries: list[Waiting]) -> None:
        """Say what is being waited for; called often."""
        if not entries:
            self.done()
        elif self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status("")
                self._status.start()
            self._status.update(describe(entries))
        else:
            names = tuple(entry.name for entry in entries)
            now_s = time.monotonic()
            if names != self._told or now_s - self._told_s >= _REPEAT_S:
                self._told, self._told_s = names, now_s
                self.line(describe(entries))

    def done(self) -> None:
        """Nothing is waited for."""
        if self._status is not None:
            self._status.stop()
            self._status = None
