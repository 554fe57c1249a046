"""Sentences of a text that is still being written. Pure."""

from __future__ import annotations

from fleet_common.sentences import sentences

#: What a voice is given at once; what is longer is cut after a clause.
MAX_CHARS = 300


class SentenceFeed:
    """Takes pieces of a text, gives each sentence once the next has begun: only then is its end certain."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, piece: str) -> tuple[str, ...]:
        """Sentences that are whole now."""
        self._rest += piece
        found = sentences(self._rest, MAX_CHARS)
        if len(found) < 2:
            return ()
        # With what follows it, blanks included: they part it from the next word.
        self._rest = self._rest[self._rest.rfind(found[-1]) :]
        return found[:-1]

    def end(self) -> tuple[str, ...]:
        """What is left when nothing more comes."""
        rest, self._rest = self._rest, ""
        return sentences(rest, MAX_CHARS)
