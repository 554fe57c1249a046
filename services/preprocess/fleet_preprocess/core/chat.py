"""Messages of a client as the values a chat template is written for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_preprocess.core.body import Message, Part

#: What chat templates call parts that hold media. A video stands where a picture would: its grid has steps in time.
TEMPLATE_TYPES = {"image_url": "image", "video_url": "image", "input_audio": "audio"}

#: Makes a user's string safe to render (`SpecialTokens.quote`).
Quote = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """What a chat template can take, found out by trying.

    Attributes:
        takes_strings: content may be a string.
        takes_parts: content may be a list of parts.
        knows_tools, knows_calls: it renders `tools`, `tool_calls`; otherwise `core/tools.py` writes them into the text.
        knows_developer: it knows the role `developer`; otherwise it becomes `system`.
        image_token, audio_token: put into the text for a medium when the template takes strings only; "" where the
            model takes none.
    """

    takes_strings: bool = True
    takes_parts: bool = True
    knows_tools: bool = False
    knows_calls: bool = False
    knows_developer: bool = False
    image_token: str = ""
    audio_token: str = ""


def template_messages(messages: Sequence[Message], style: TemplateStyle, quote: Quote) -> list[dict[str, Any]]:
    """Values for the template's `messages`; every string that came from the client is quoted.

    What a template does not know of tools has been written into the messages (`core/tools.py`).
    """
    return [_template_message(message, style, quote) for message in messages]


def quote_deep(value: Any, quote: Quote) -> Any:
    """Quote every string of a JSON value, keys included."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return [quote_deep(element, quote) for element in value]
    if isinstance(value, dict):
        return {quote(key): quote_deep(element, quote) for key, element in value.items()}
    return value


def _template_message(message: Message, style: TemplateStyle, quote: Quote) -> dict[str, Any]:
    is_developer = message.role == "developer" and not style.knows_developer
    made: dict[str, Any] = {
        "role": "system" if is_developer else message.role,
        "content": _content(message.content, style, quote),
    }
    if message.name is not None:
        made["name"] = quote(message.name)
    if message.tool_call_id is not None:
        made["tool_call_id"] = quote(message.tool_call_id)
    if message.tool_calls:
        made["tool_calls"] = [_with_parsed_arguments(quote_deep(call, quote)) for call in message.tool_calls]
    return made


def _content(content: str | list[Part] | None, style: TemplateStyle, quote: Quote) -> str | list[dict[str, Any]]:
    if content is None:
        content = ""
    if isinstance(content, str):
        return quote(content) if style.takes_strings else [{"type": "text", "text": quote(content)}]
    if style.takes_parts:
        return [_template_part(part, quote) for part in content]
    tokens = {"image": style.image_token, "audio": style.audio_token}
    kinds = ((TEMPLATE_TYPES.get(part.type), part) for part in content)
    return "\n".join(tokens[kind] if kind is not None else quote(part.text or "") for kind, part in kinds)


def _template_part(part: Part, quote: Quote) -> dict[str, Any]:
    if part.type in TEMPLATE_TYPES:
        return {"type": TEMPLATE_TYPES[part.type]}
    return {"type": "text", "text": quote(part.text or "")}


def _with_parsed_arguments(call: Any) -> Any:
    """Templates are written for arguments as an object, while clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
