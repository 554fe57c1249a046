"""Finds function calls in the text of an answer, piece by piece as it arrives. A function of the text alone.

What makes no call stays text: a malformed call, or one of a function that was not given, is shown as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fleet_ingress.core.tools import ToolUse

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"

_json = json.JSONDecoder()
_STRING_OR_END = re.compile(rf'"(?:[^"\\]|\\.)*(?P<end>"?)|{CLOSE_TAG}', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of call number `index`: with its name at first, then only more of its arguments."""

    index: int
    arguments: str
    name: str | None = None


Piece = TextPiece | CallPiece


class Shaper(Protocol):
    """Turns the text of one choice into pieces."""

    num_calls: int

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""

    def finish(self) -> list[Piece]:
        """The rest: no more text comes."""


def make_shaper(tools: ToolUse | None) -> Shaper:
    """The one for a request's tools."""
    if tools is None:
        return PlainShaper()
    if tools.forced_name:
        return ArgumentsShaper(tools.forced_name)
    return ListShaper(tools) if tools.is_forced else TaggedShaper(tools)


class PlainShaper:
    """No tools: all is text."""

    num_calls = 0

    def push(self, text: str) -> list[Piece]:
        return [TextPiece(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ArgumentsShaper:
    """The answer is the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        name = self._name if self.num_calls == 0 else None
        self.num_calls = 1
        return [CallPiece(0, text, name)]

    def finish(self) -> list[Piece]:
        return []


class _CallShaper:
    """What shapers that find whole calls share."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        self._buffer = ""
        self._space = ""
        self.num_calls = 0

    def _call(self, name: str, arguments: str) -> list[Piece]:
        self._space = ""
        if self.num_calls >= self._tools.max_calls:
            return []
        self.num_calls += 1
        return [CallPiece(self.num_calls - 1, arguments, name)]

    def _text(self, text: str) -> list[Piece]:
        """Text without the space at its end: that is dropped when a call follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [TextPiece(shown)] if shown else []

    def _rest(self) -> list[Piece]:
        text, self._space = self._space, ""
        return [TextPiece(text)] if text and self.num_calls == 0 else []


class TaggedShaper(_CallShaper):
    """Calls stand as JSON between `<tool_call>` tags (Hermes, Qwen, SmolLM2): an object, or a list of them."""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        # Within a call only this can end it: a long one is not read again for every token.
        if self._buffer.startswith(OPEN_TAG) and CLOSE_TAG[-1] not in text:
            return []
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        # Some models end the turn instead of the tag.
        calls = self._calls_in(self._buffer.removeprefix(OPEN_TAG)) if self._buffer.startswith(OPEN_TAG) else None
        pieces = self._text(self._buffer) if calls is None else self._made(calls)
        self._buffer = ""
        return [*pieces, *self._rest()]

    def _step(self, pieces: list[Piece]) -> bool:
        """Take one stretch off the buffer; False when more text is needed."""
        start = self._buffer.find(OPEN_TAG)
        if start != 0:
            keep = len(self._buffer) - _num_held(self._buffer) if start < 0 else start
            pieces += self._text(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return start > 0
        end = _end_of_call(self._buffer)
        if end < 0:
            return False
        calls = self._calls_in(self._buffer[len(OPEN_TAG) : end])
        cut = end + len(CLOSE_TAG)
        pieces += self._text(self._buffer[:cut]) if calls is None else self._made(calls)
        self._buffer = self._buffer[cut:]
        return True

    def _made(self, calls: list[tuple[str, str]]) -> list[Piece]:
        return [piece for name, arguments in calls for piece in self._call(name, arguments)]

    def _calls_in(self, text: str) -> list[tuple[str, str]] | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        found = [read_call(item, self._tools.names) for item in (value if isinstance(value, list) else [value])]
        calls = [call for call in found if call is not None]
        return calls if calls and len(calls) == len(found) else None


class ListShaper(_CallShaper):
    """The answer is a JSON array of calls, by force of a grammar."""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        # Only a brace can complete a call.
        return list(self._complete()) if "}" in text else []

    def finish(self) -> list[Piece]:
        pieces = list(self._complete())
        # An array that was cut short: what is left makes no call.
        if self._buffer.strip("[], \n\t\r"):
            pieces += self._text(self._buffer)
        self._buffer = ""
        return pieces

    def _complete(self) -> Iterator[Piece]:
        while True:
            rest = self._buffer.lstrip("[, \n\t\r")
            try:
                value, end = _json.raw_decode(rest)
            except (ValueError, RecursionError):
                return
            call = read_call(value, self._tools.names)
            if call is None:
                return
            self._buffer = rest[end:]
            yield from self._call(*call)


def read_call(value: object, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call as models write it; None when it is none."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return str(value["name"]), json.dumps(arguments, ensure_ascii=False)


def _end_of_call(text: str) -> int:
    """Where the closing tag stands; -1 when it has not come. One within a string of the arguments is none."""
    for match in _STRING_OR_END.finditer(text):
        if match.group() == CLOSE_TAG:
            return match.start()
        if not match["end"]:
            return -1
    return -1


def _num_held(text: str) -> int:
    """Characters at the end that may be the beginning of a tag."""
    for size in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1):
        if OPEN_TAG.startswith(text[-size:]):
            return size
    return 0
