"""`POST /v1/tokenize`: how many tokens a prompt is for a model."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet_ingress.api.chat import ChatMessage
from fleet_ingress.api.tools import NamedTool, Tool


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `messages`, with what belongs to them, and `prompt`; as in the routes that generate."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    prompt: str | list[str | int | list[int]] | None = None


class TokenCountReport(msgspec.Struct, frozen=True, kw_only=True):
    """`count` is what `usage.prompt_tokens` would be, pictures included."""

    object: str = "token_count"
    model: str
    count: int
