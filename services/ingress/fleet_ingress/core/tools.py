"""Tools of a chat request: what the client may ask for, and how the answer is held to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fleet_common.errors import InvalidInputError
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.formats import JsonObjectFormat, JsonSchemaFormat
from fleet_ingress.api.tools import NamedTool, Tool
from fleet_ingress.core.schema import ANY_OBJECT, MAX_SCHEMA_BYTES, checked_schema

MAX_TOOLS = 128
#: Calls in one answer where the model has to call: without a bound a small model never stops calling.
MAX_FORCED_CALLS = 4

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How calls are found in an answer.

    Attributes:
        names: functions that may be called.
        forced_name: the answer is this function's arguments; "" else.
        is_forced: the answer is a JSON array of calls; else they stand in the text, between `<tool_call>` tags.
        max_calls: calls beyond it are dropped.
    """

    names: frozenset[str]
    forced_name: str = ""
    is_forced: bool = False
    max_calls: int = MAX_TOOLS


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What the answer has to be.

    Attributes:
        schema: JSON Schema text, "" for none.
        schema_param: the field to name when the engine cannot do the schema.
        tools: None when no tool may be called.
    """

    schema: str = ""
    schema_param: str = ""
    tools: ToolUse | None = None


def answer_rules(request: ChatRequest) -> AnswerRules:
    """From `response_format`, `tools` and `tool_choice`. Raises InvalidInputError."""
    tools = request.tools or []
    schemas = _tool_schemas(tools)
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in schemas:
        raise InvalidInputError("`tool_choice` names a function that is not in `tools`.", param="tool_choice")
    if choice == "required" and not tools:
        raise InvalidInputError("`tool_choice` is `required`, but there are no `tools`.", param="tool_choice")
    if not tools or choice == "none":
        return _format_rules(request)
    if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        raise InvalidInputError(
            "`response_format` together with `tools` that may be called is not supported yet.",
            param="response_format",
            code="unsupported_parameter",
        )
    names = frozenset(schemas)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        schema = msgspec.json.encode(schemas[name]).decode()
        return AnswerRules(schema, f"tools[{list(schemas).index(name)}].function.parameters", ToolUse(names, name))
    is_parallel = request.parallel_tool_calls is not False
    if choice == "required":
        max_calls = MAX_FORCED_CALLS if is_parallel else 1
        return AnswerRules(_calls_schema(schemas, max_calls), "tools", ToolUse(names, "", True, max_calls))
    return AnswerRules(tools=ToolUse(names, max_calls=MAX_TOOLS if is_parallel else 1))


def _format_rules(request: ChatRequest) -> AnswerRules:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return AnswerRules(ANY_OBJECT, "response_format")
    if isinstance(wanted, JsonSchemaFormat):
        if not _NAME.fullmatch(wanted.json_schema.name):
            raise InvalidInputError(
                "A name has 1 to 64 letters, digits, `_` or `-`.", param="response_format.json_schema.name"
            )
        param = "response_format.json_schema.schema"
        return AnswerRules(checked_schema(wanted.json_schema.schema, param), param)
    return AnswerRules()


def _tool_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Parameters by function name, in the client's order. Raises InvalidInputError."""
    if len(tools) > MAX_TOOLS:
        raise InvalidInputError(f"At most {MAX_TOOLS} tools.", param="tools")
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function, place = tool.function, f"tools[{index}].function"
        if not _NAME.fullmatch(function.name):
            raise InvalidInputError("A name has 1 to 64 letters, digits, `_` or `-`.", param=f"{place}.name")
        if function.name in schemas:
            raise InvalidInputError("Two functions have the same name.", param=f"{place}.name")
        schema = _NO_PARAMETERS if function.parameters is None else function.parameters
        checked_schema(schema, f"{place}.parameters")
        if schema.get("type", "object") != "object":
            raise InvalidInputError("The parameters of a function are an object.", param=f"{place}.parameters")
        schemas[function.name] = {"type": "object", **schema}
    return schemas


def _calls_schema(schemas: Mapping[str, dict[str, Any]], max_calls: int) -> str:
    """A list of calls; each function's schema stays whole in `$defs`, its references moved along."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [name]}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()},
    }
    text = msgspec.json.encode(schema).decode()
    if len(text.encode()) > 2 * MAX_SCHEMA_BYTES:
        raise InvalidInputError(
            "The parameters of all tools together are too large for `required`; name one function.",
            param="tools",
            code="invalid_schema",
        )
    return text


def _moved(value: Any, prefix: str) -> Any:
    """A schema whose root is now at `prefix`."""
    if isinstance(value, Mapping):
        return {
            key: prefix + item[1:]
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _moved(item, prefix)
            for key, item in value.items()
        }
    return [_moved(item, prefix) for item in value] if isinstance(value, list) else value
