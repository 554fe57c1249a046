"""What scripted workers do with one request."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fleet_contracts.decode import TokenLogprob
from fleet_contracts.events import MAX_CHUNK_BYTES, Attempt, ChoiceProgress, Chunk, Failure, Token


class FaultError(Exception):
    """The scripted worker dies here: nothing is settled, nothing said."""


@dataclass(frozen=True, slots=True)
class Script:
    """The course of one request.

    Attributes:
        pieces: bytes per token, the same for every choice; a character may be split over tokens.
        logprobs: one per token, or none.
        before_token: awaited before each token with its index; raise FaultError to die there.
        refuse: preprocess fails with it.
        num_inputs: vectors of an embeddings answer.
        fail: decode fails with it before token (or medium) `fail_at`.
        media: what audio stages stream instead of tokens: media type and bytes, `before_token` before each.
    """

    pieces: Sequence[bytes] = (b"Hello", b" world")
    finish_reason: str = "stop"
    logprobs: Sequence[TokenLogprob] = ()
    before_token: Callable[[int], Awaitable[None]] | None = None
    refuse: Failure | None = None
    fail: Failure | None = None
    fail_at: int = 0
    num_prompt_tokens: int = 7
    media: Sequence[tuple[str, bytes]] = ()
    num_inputs: int = 1

    def texts(self) -> list[str]:
        """Text each token lets go: none while a character is incomplete."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        last = len(self.pieces) - 1
        return [decoder.decode(piece, final=index == last) for index, piece in enumerate(self.pieces)]

    def token(self, attempt: Attempt, seq: int, choice: int, index: int) -> Token:
        """The event of one token; its id is its index."""
        texts = self.texts()
        return Token(
            attempt=attempt,
            seq=seq,
            choice=choice,
            index=index,
            token_ids=(index,),
            text=texts[index],
            text_offset=sum(len(text) for text in texts[:index]),
            logprobs=tuple(self.logprobs[index : index + 1]),
            finish_reason=self.finish_reason if index == len(self.pieces) - 1 else None,
        )

    def chunks(self, attempt: Attempt, seq: int, index: int) -> list[Chunk]:
        """The events of one medium, in pieces of at most `MAX_CHUNK_BYTES`."""
        media_type, data = self.media[index]
        pieces = [data[at : at + MAX_CHUNK_BYTES] for at in range(0, len(data), MAX_CHUNK_BYTES)] or [b""]
        return [
            Chunk(
                attempt=attempt,
                seq=seq + number,
                media_type=media_type,
                data=piece,
                index=index,
                piece=number,
                num_pieces=len(pieces),
                is_last=index == len(self.media) - 1,
            )
            for number, piece in enumerate(pieces)
        ]


def first_index(known: ChoiceProgress) -> int:
    """Where a later attempt goes on."""
    return len(known.token_ids)
