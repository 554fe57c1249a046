"""Vocabulary of a real model, from its `tokenizers` tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from fleet_decode.core.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer

_SPACE_MARK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, as a map back."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenizerVocabulary:
    """Byte-level vocabularies get the exact and fast way; every other is decoded in a window.

    Args:
        tokenizer: a fast tokenizer (`tokenizer.json`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(tokenizer)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)
        self._text_bytes = lru_cache(maxsize=None)(self._text_bytes_of)

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._text_bytes) if self._is_byte_level else WindowDetokenizer(self._decode)

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and token_id not in self._special:
            return _byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return token.replace(_SPACE_MARK, " ").encode()

    def _text_bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self._token_bytes(token_id)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_level_bytes(token: str) -> bytes:
    """A token with a character outside the alphabet was added as plain text, and stands for itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
