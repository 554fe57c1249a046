"""Tools for chat templates that know none, in words: the format Hermes, Qwen and SmolLM2 were trained on.

The ingress finds calls of that format in the answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from fleet_preprocess.core.body import Message, Part

_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TAIL = """
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_SYSTEM_ROLES = frozenset({"system", "developer"})


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text; results become turns of the user, results that follow each other one turn."""
    made: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{_text_of(message)}\n</tool_response>"
            if made and made[-1].role == "tool":
                made[-1] = _with_text(made[-1], result)
            else:
                made.append(Message(role="tool", content=result))
        elif message.tool_calls:
            calls = "\n".join(_call_text(call) for call in message.tool_calls)
            made.append(_with_text(msgspec.structs.replace(message, tool_calls=None), calls))
        else:
            made.append(message)
    return [msgspec.structs.replace(turn, role="user") if turn.role == "tool" else turn for turn in made]


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
    """Tools at the end of the first system message, or in a new one."""
    if not tools:
        return list(messages)
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"{_HEAD}{listed}{_TAIL}"
    if messages and messages[0].role in _SYSTEM_ROLES:
        return [_with_text(messages[0], text, gap="\n\n"), *messages[1:]]
    return [Message(role="system", content=text), *messages]


def _with_text(message: Message, text: str, gap: str = "\n") -> Message:
    """`text` after what the message says already."""
    content = message.content
    if isinstance(content, list):
        return msgspec.structs.replace(message, content=[*content, Part(type="text", text=gap + text)])
    return msgspec.structs.replace(message, content=f"{content}{gap}{text}" if content else text)


def _text_of(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # shown as the text it is
            arguments = json.loads(arguments)
    text = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
