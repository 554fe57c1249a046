"""Order of one request's tokens: what arrived, in which order, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_contracts.decode import TokenLogprob
from fleet_contracts.events import ChoiceProgress, Token


class StreamDivergedError(Exception):
    """A later attempt produced other tokens than those the client has: the request must fail, not show a seam."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token event adds to one choice, after everything added before.

    Attributes:
        num_tokens: ids added.
        finish_reason: set in the last delta of the choice.
    """

    choice: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class AttemptLog:
    """Which sequence numbers of one attempt arrived. Numbers count from 0 without gaps."""

    next_seq: int = 0
    ahead: set[int] = field(default_factory=set)

    def note(self, seq: int) -> None:
        """Remember an arrival; twice is the same as once."""
        if seq < self.next_seq:
            return
        self.ahead.add(seq)
        while self.next_seq in self.ahead:
            self.ahead.remove(self.next_seq)
            self.next_seq += 1

    def is_whole_before(self, seq: int) -> bool:
        """True when every number below `seq` has arrived."""
        return self.next_seq >= seq


@dataclass(slots=True)
class ChoiceStream:
    """One choice: ids and text in order, and events that came too early.

    A position is a pair (ids, characters), as an event may carry text without ids (held back text let go) or ids
    without text (held back).
    """

    choice: int
    token_ids: list[int] = field(default_factory=list)
    num_text_chars: int = 0
    finish_reason: str | None = None
    early: list[Token] = field(default_factory=list)

    def offer(self, token: Token) -> list[Delta]:
        """Take an event in; returns what can be shown now, in order. Raises StreamDivergedError."""
        if self._is_early(token):
            self.early.append(token)
            return []
        deltas = self._apply(token)
        while deltas and (ready := [early for early in self.early if not self._is_early(early)]):
            self.early = [early for early in self.early if self._is_early(early)]
            for early in sorted(ready, key=lambda item: (item.index, item.text_offset, item.seq)):
                if self._is_early(early):
                    self.early.append(early)
                else:
                    deltas.extend(self._apply(early))
        return deltas

    def forget_early(self) -> None:
        """Drop events that wait for a gap to close: their attempt is outranked."""
        self.early.clear()

    def progress(self) -> ChoiceProgress:
        """What a new attempt has to know to go on."""
        return ChoiceProgress(
            token_ids=tuple(self.token_ids), num_text_chars=self.num_text_chars, finish_reason=self.finish_reason
        )

    def _is_early(self, token: Token) -> bool:
        return token.index > len(self.token_ids) or token.text_offset > self.num_text_chars

    def _apply(self, token: Token) -> list[Delta]:
        known = len(self.token_ids) - token.index
        overlap = token.token_ids[:known]
        if overlap and list(overlap) != self.token_ids[token.index : token.index + len(overlap)]:
            raise StreamDivergedError(f"choice {token.choice} at token {token.index}")
        if self.finish_reason is not None:
            return []
        new_ids = token.token_ids[known:]
        new_text = token.text[self.num_text_chars - token.text_offset :]
        if not new_ids and not new_text and token.finish_reason is None:
            return []
        self.token_ids.extend(new_ids)
        self.num_text_chars += len(new_text)
        self.finish_reason = token.finish_reason
        return [
            Delta(
                choice=self.choice,
                text=new_text,
                num_tokens=len(new_ids),
                logprobs=token.logprobs[known:] if known else token.logprobs,
                finish_reason=token.finish_reason,
                stop_reason=token.stop_reason,
            )
        ]
