"""A tokenizer whose special tokens only the chat template can write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fleet_common.errors import InvalidInputError
from fleet_preprocess.core.specials import SpecialTokens


class GuardedTokenizer:
    """tokenizer.json with its special tokens renamed to stand-ins (see `core/specials.py`), ids as in the original."""

    def __init__(self, path: Path, extra_specials: Sequence[str], nonce: str) -> None:
        """
        Args:
            path: tokenizer.json.
            extra_specials: tokens to guard though the file does not call them special, like the image token.
            nonce: unguessable, lower-case hex.
        Raises:
            ValueError: ids of the file leave no room for stand-ins.
        """
        spec = json.loads(path.read_text(encoding="utf-8"))
        added: list[dict[str, Any]] = spec.get("added_tokens", [])
        guarded = {t["content"]: int(t["id"]) for t in added if t["special"] or t["content"] in extra_specials}
        self.specials = SpecialTokens(list(guarded), nonce)
        renamed = [{**t, "content": self._name(t["content"], guarded)} for t in added]
        self._tokenizer = Tokenizer.from_str(json.dumps({**spec, "added_tokens": renamed}))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._original_id = {
            self._tokenizer.token_to_id(new["content"]): int(old["id"]) for new, old in zip(renamed, added, strict=True)
        }
        self._unwritable = frozenset(guarded.values()) - self._original_id.keys() - {_unknown_id(spec)}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        plain_ids = frozenset(vocabulary.values())
        self._check_room(guarded, plain_ids)
        self.prefix_ids, self.suffix_ids = self._find_surroundings()
        self.vocab_size = max(*plain_ids, *self._original_id.values(), 0) + 1
        self.max_token_chars = max(len(content) for content in (*vocabulary, *(str(t["content"]) for t in added)))
        self.content_by_id: Mapping[int, str] = {int(t["id"]): t["content"] for t in added}

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered template; strings of clients in it must have been quoted with `specials`.

        Raises:
            InvalidInputError: text that this tokenizer cannot write without a special token.
        """
        ids = self._tokenizer.encode(self.specials.resolve(rendered), add_special_tokens=False).ids
        if not self._unwritable.isdisjoint(ids):
            raise InvalidInputError("the text holds a special token of this model", code="special_token_in_text")
        return [self._original_id.get(token_id, token_id) for token_id in ids]

    def _name(self, content: str, guarded: Mapping[str, int]) -> str:
        return self.specials.stand_in(content) if content in guarded else content

    def _check_room(self, guarded: Mapping[str, int], plain_ids: frozenset[int]) -> None:
        taken = [self._tokenizer.token_to_id(self.specials.stand_in(content)) for content in guarded]
        if None in taken or not plain_ids.isdisjoint(taken):
            raise ValueError("the tokenizer's ids have gaps: special tokens cannot be told from text")

    def _find_surroundings(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before every plain text (its begin-of-text token, mostly), and behind it."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return list(full[:start]), list(full[start + len(plain) :])
        return [], []


def _unknown_id(spec: Mapping[str, Any]) -> int:
    """Id that stands for unknown characters: text may well give it. -1: none."""
    model = spec["model"]
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    vocab = model.get("vocab")
    unknown = model.get("unk_token")
    return int(vocab.get(unknown, -1)) if isinstance(vocab, dict) and unknown is not None else -1
