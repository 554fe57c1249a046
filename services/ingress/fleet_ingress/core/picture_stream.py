"""Pictures of one request in the order they can be shown, whichever attempt made them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_contracts.events import Picture


@dataclass(frozen=True, slots=True)
class PictureMade:
    """A picture the client has not seen. Its file has been read, or is read by whoever gets this."""

    picture: Picture


@dataclass(frozen=True, slots=True)
class ProgressMade:
    """Share of the request that is done, 0-1; it only rises."""

    done_ratio: float


PictureNews = PictureMade | ProgressMade


@dataclass(slots=True)
class PictureStream:
    """What has been shown of `num_choices` pictures.

    Every attempt makes the same pictures at the same positions, so those of a later attempt that were shown already are
    dropped, and progress waits until it is above what was told.
    """

    num_choices: int
    done_ratio: float = 0.0
    next_index: dict[int, int] = field(default_factory=dict)
    finals: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether every choice has its final picture."""
        return len(self.finals) == self.num_choices

    def offer(self, picture: Picture) -> list[PictureNews]:
        """Take a picture in; returns what is new to the client."""
        choice = picture.choice
        if not 0 <= choice < self.num_choices or choice in self.finals:
            return []
        # A partial picture that comes after a later one shows nothing.
        if not picture.is_final and picture.index < self.next_index.get(choice, 0):
            return []
        self.next_index[choice] = picture.index + 1
        if picture.is_final:
            self.finals.add(choice)
        return [PictureMade(picture)]

    def progress(self, done_ratio: float) -> list[PictureNews]:
        """A worker told how far it is; returns what is new to the client."""
        if not self.done_ratio < done_ratio <= 1.0:
            return []
        self.done_ratio = done_ratio
        return [ProgressMade(done_ratio)]
