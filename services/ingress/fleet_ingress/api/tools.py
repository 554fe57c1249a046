"""`tools` and `tool_choice` of a chat completion."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function of the client.

    Attributes:
        parameters: JSON Schema of an object; absent: no parameters.
        strict: has no effect.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool; there are only functions."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction
