"""Cuts text into what a voice says in one go. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PARAGRAPH = re.compile(r"\s*\n\s*")
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*\s+|(?<=[。！？])(?=\S)")
_CLAUSE_END = re.compile(r"(?<=[,;:—–])\s+")
_BLANK = re.compile(r"\s+")

#: A full stop after one of these ends no sentence.
_ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "no", "fig", "e.g", "i.e", "approx", "gen", "rev"}
)


def sentences(text: str, max_chars: int) -> tuple[str, ...]:
    """Sentences of a text, without blanks around them, none longer than `max_chars`.

    What is too long is cut after a clause, else between words, else anywhere. Pieces without a letter or digit are
    left out: nobody can say them. The same text always gives the same pieces.
    """
    pieces = [
        piece
        for paragraph in _PARAGRAPH.split(text)
        for sentence in _of_paragraph(paragraph.strip())
        for piece in _cut(sentence, max_chars)
    ]
    return tuple(piece for piece in pieces if any(char.isalnum() for char in piece))


def _of_paragraph(paragraph: str) -> Iterator[str]:
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        head = paragraph[start : end.end()]
        if _is_abbreviated(head, paragraph[end.end() : end.end() + 1]):
            continue
        yield head.strip()
        start = end.end()
    if start < len(paragraph):
        yield paragraph[start:].strip()


def _is_abbreviated(head: str, following: str) -> bool:
    """Whether the full stop at the end of `head` belongs to its last word."""
    head = head.rstrip()
    if not head.endswith("."):
        return False
    word = head[:-1].rpartition(" ")[2].lstrip("(\"'“‘")
    return following.islower() or word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


def _cut(sentence: str, max_chars: int) -> Iterator[str]:
    while len(sentence) > max_chars:
        at = _last_break(sentence, max_chars)
        yield sentence[:at].strip()
        sentence = sentence[at:].strip()
    if sentence:
        yield sentence


def _last_break(sentence: str, max_chars: int) -> int:
    for pattern in (_CLAUSE_END, _BLANK):
        ends = [found.end() for found in pattern.finditer(sentence, 0, max_chars + 1) if found.end() <= max_chars]
        if ends:
            return ends[-1]
    return max_chars
