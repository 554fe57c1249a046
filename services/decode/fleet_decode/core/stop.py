"""Stop strings: found over token borders, never shown, not even their head."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete.

    Holds back only the longest tail that could still become a stop string. The match that is complete first wins
    (of those, the one that began first), so the result does not depend on how the text is cut into pieces.

    Args:
        stops: stop strings; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str, *, is_armed: bool = True) -> tuple[str, str | None]:
        """Take new text.

        Args:
            text: characters after those pushed before.
            is_armed: False while `min_tokens` is not reached: a stop string may pass.
        Returns:
            Text that may be shown now, and the stop string that ended the stream, if one did.
        """
        if not self._stops:
            return text, None
        num_old = len(self._held)
        window = self._held + text
        if is_armed and text:
            match = self._first_match(window, num_old)
            if match is not None:
                start, stop = match
                self._held = ""
                return window[:start], stop
        num_held = self._num_possible(window)
        border = len(window) - num_held
        self._held = window[border:]
        return window[:border], None

    def flush(self) -> str:
        """The held tail, when the stream ended without a match."""
        tail, self._held = self._held, ""
        return tail

    def _first_match(self, window: str, num_old: int) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A match that ends within the old part was let pass on purpose (min_tokens).
            start = window.find(stop, max(0, num_old - len(stop) + 1))
            if start < 0:
                continue
            found = (start + len(stop), start, stop)
            if best is None or found < best:
                best = found
        return None if best is None else (best[1], best[2])

    def _num_possible(self, window: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(window)), longest, -1):
                if window.endswith(stop[:length]):
                    longest = length
                    break
        return longest
