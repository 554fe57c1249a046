"""Text out of token ids, one token at a time.

The text of a stream is a function of its ids alone, whatever events they arrive in: a stream that is continued
elsewhere replays its ids and goes on with the very next character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """State of one stream."""

    def push(self, token_id: int) -> str:
        """Characters that are complete with this token; "" while a character is split over tokens."""

    def flush(self) -> str:
        """What is still held back, a broken character as U+FFFD. The stream is over afterwards."""


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings (byte-level BPE): text is their concatenation as UTF-8.

    Args:
        piece: bytes of a token id; b"" for special tokens.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._piece(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window twice and takes the difference.

    A window is what was decoded before the last complete character plus all tokens since, so that spaces which
    depend on neighbours come out as in one call over all ids.

    Args:
        decode: text of a sequence of ids, special tokens skipped.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_settled = 0
        self._settled_text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._settled_text):
            return ""
        fresh = text[len(self._settled_text) :]
        self._ids = self._ids[self._num_settled :]
        self._num_settled = len(self._ids)
        self._settled_text = self._decode(self._ids)
        return fresh

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._settled_text) :]
