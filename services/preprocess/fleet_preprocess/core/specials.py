"""Keeps text of users from ever becoming special tokens.

The text is *quoted* before the chat template sees it: every literal of a special token in it is replaced by an
unguessable word. What is left of such literals after rendering was written by the template, and becomes an equally
unguessable *stand-in*; then the quoted words turn back into plain text. A tokenizer whose special tokens are called by
their stand-ins cannot mistake one for the other, and text without such literals passes through unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class SpecialTokens:
    """The special tokens of one tokenizer and the two secret alphabets that stand for them."""

    def __init__(self, literals: Sequence[str], nonce: str) -> None:
        """
        Args:
            literals: what special tokens look like in templates, like `<image>`.
            nonce: lower-case hex, unguessable, never shown to anyone.
        """
        self._literals = tuple(literals)
        self._index = {literal: i for i, literal in enumerate(self._literals)}
        self._nonce = nonce
        # Longest first: alternation takes the first that matches, tokenizers take the longest.
        ordered = sorted(self._literals, key=len, reverse=True)
        any_literal = "|".join(re.escape(literal) for literal in ordered) or r"(?!)"
        self._literal = re.compile(any_literal)
        self._rendered = re.compile(rf"q{nonce}q(?P<quoted>\d*)q|(?P<real>{any_literal})")
        self._heads = frozenset(literal[:k] for literal in self._literals for k in range(1, len(literal)))
        self._tails = frozenset(literal[k:] for literal in self._literals for k in range(1, len(literal)))
        self._reach = max((len(literal) for literal in self._literals), default=0)

    def quote(self, text: str) -> str:
        """Text of a user, with no special token in it nor any that could form with its neighbours."""
        quoted = self._literal.sub(lambda match: self._quoted(match.group()), text)
        if any(text[:k] in self._tails for k in range(1, min(self._reach, len(text) + 1))):
            quoted = f"q{self._nonce}qq{quoted}"
        if any(text[-k:] in self._heads for k in range(1, min(self._reach, len(text) + 1))):
            quoted = f"{quoted}q{self._nonce}qq"
        return quoted

    def resolve(self, rendered: str) -> str:
        """A rendered template with stand-ins for its own special tokens and the users' text as it was."""
        return self._rendered.sub(self._resolved, rendered)

    def stand_in(self, literal: str) -> str:
        """What the tokenizer must call that special token. KeyError when it is none."""
        return f"s{self._nonce}s{self._index[literal]}s"

    def _quoted(self, literal: str) -> str:
        return f"q{self._nonce}q{self._index[literal]}q"

    def _resolved(self, match: re.Match[str]) -> str:
        real = match.group("real")
        if real is not None:
            return self.stand_in(real)
        number = match.group("quoted")
        return self._literals[int(number)] if number else ""
