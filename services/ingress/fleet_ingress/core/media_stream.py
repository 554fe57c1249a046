"""Order of one request's media: which are whole, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_contracts.events import Chunk

#: More pieces than any medium of ours has.
_MAX_PIECES = 10_000


@dataclass(frozen=True, slots=True)
class MediaDelta:
    """One whole medium, after every one before it; `is_last` where that is known."""

    index: int
    media_type: str
    data: bytes
    is_last: bool = False


@dataclass(slots=True)
class MediaStream:
    """The media of one request.

    A medium is given on once all its pieces are there: an attempt that takes over makes it anew, without a seam.

    Attributes:
        num_whole: media given on.
        pieces: by medium and piece, those that wait for others.
    """

    num_whole: int = 0
    pieces: dict[int, dict[int, Chunk]] = field(default_factory=dict)

    def offer(self, chunk: Chunk) -> list[MediaDelta] | None:
        """Take an event in; returns what can be given on now, in order. None: the event is of no use."""
        if not 0 <= chunk.piece < chunk.num_pieces <= _MAX_PIECES or chunk.index < self.num_whole:
            return None
        self.pieces.setdefault(chunk.index, {})[chunk.piece] = chunk
        deltas = []
        while (whole := self._whole(self.num_whole)) is not None:
            del self.pieces[self.num_whole]
            deltas.append(whole)
            self.num_whole += 1
        return deltas

    def forget_early(self) -> None:
        """Drop what waits: its attempt is outranked."""
        self.pieces.clear()

    def _whole(self, index: int) -> MediaDelta | None:
        pieces = self.pieces.get(index, {})
        if not pieces or len(pieces) < pieces[min(pieces)].num_pieces:
            return None
        ordered = [pieces[number] for number in sorted(pieces)]
        return MediaDelta(index, ordered[0].media_type, b"".join(chunk.data for chunk in ordered), ordered[0].is_last)
