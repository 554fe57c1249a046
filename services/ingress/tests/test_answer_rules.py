"""`response_format`, `tools` and `tool_choice`: what is taken, what is refused, and what the answer is held to."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from fleet_common.errors import InvalidInputError
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.decode import decode_request
from fleet_ingress.core.parsed import ParsedRequest, parse_chat
from fleet_ingress.core.plan import make_plan

_SCHEMA = "response_format.json_schema.schema"
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "pet": {"$ref": "#/$defs/Pet"}},
    "required": ["name"],
    "$defs": {"Pet": {"anyOf": [{"const": None}, {"type": "object", "properties": {"of": {"$ref": "#/$defs/Pet"}}}]}},
}
_LARGE = {"properties": {"a": {"enum": ["x" * 15_000]}}}


def chat(**fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(decode_request(json.dumps(body).encode(), ChatRequest), max_choices=4)


def refusal(**fields: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        chat(**fields)
    return caught.value


def schema_format(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_schema_reaches_the_decode_step_as_it_was_sent_nulls_included() -> None:
    # The null field makes the ingress read the body the slow way, which drops nulls.
    parsed = chat(response_format=schema_format(_PERSON), stop=None)

    assert json.loads(parsed.decode.response_schema) == _PERSON
    assert parsed.schema_param == _SCHEMA


def test_json_object_is_the_schema_of_any_object() -> None:
    assert json.loads(chat(response_format={"type": "json_object"}).decode.response_schema) == {"type": "object"}


def test_sampling_under_a_schema_can_be_repeated_by_another_worker() -> None:
    free = chat(response_format={"type": "json_object"})
    seeded = chat(response_format={"type": "json_object"}, seed=3)
    greedy = chat(response_format={"type": "json_object"}, temperature=0)

    assert [make_plan(parsed, seed=9).steps[-1].params.seed for parsed in (free, seeded, greedy)] == [9, 3, None]
    assert make_plan(chat(), seed=9).steps[-1].params.seed is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "thing"},
        {"type": ["string", 5]},
        {"properties": []},
        {"properties": {"a": 5}},
        {"enum": []},
        {"required": "name"},
        {"anyOf": []},
        {"items": {"type": "array", "items": [1]}},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/None"},
        {"$ref": "#"},
        {"$defs": {"A": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"},
        {"type": "string", "maxLength": 10_001},
        {"type": "array", "minItems": -1},
        nested(33),
        nested(400),
        {"enum": ["x" * 20_000]},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_bad_schema_is_refused_before_any_work(schema: Any) -> None:
    error = refusal(response_format=schema_format(schema))

    assert (error.param, error.code) == (_SCHEMA, "invalid_schema")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format([])}, _SCHEMA),
        ({"response_format": schema_format({}, name="a b")}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", {"properties": 5})]}, "tools[0].function.parameters"),
        ({"tools": [tool(f"f{number}") for number in range(129)]}, "tools"),
        ({"tools": [tool(name, _LARGE) for name in "fgh"], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool("f")]}, "tool_choice"),
        ({"tools": [tool("f")], "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_refusal_names_the_field_at_fault(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_tools_that_must_not_be_called_leave_the_answer_free() -> None:
    parsed = chat(tools=[tool("f")], tool_choice="none", response_format={"type": "json_object"})

    assert parsed.tools is None
    assert parsed.schema_param == "response_format"


def test_a_named_function_holds_the_answer_to_its_parameters() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    parsed = chat(tools=[tool("f"), tool("g", _PERSON)], tool_choice=choice)

    assert json.loads(parsed.decode.response_schema) == _PERSON
    assert parsed.tools is not None and parsed.tools.forced_name == "g"
    assert parsed.schema_param == "tools[1].function.parameters"


@pytest.mark.parametrize(("is_parallel", "max_calls"), [(None, 4), (True, 4), (False, 1)])
def test_required_holds_the_answer_to_a_list_of_calls(is_parallel: bool | None, max_calls: int) -> None:
    parsed = chat(tools=[tool("f"), tool("g", _PERSON)], tool_choice="required", parallel_tool_calls=is_parallel)

    schema = json.loads(parsed.decode.response_schema)
    call = {"name": "g", "arguments": {"name": "Ann", "pet": {"of": None}}}
    jsonschema.validate([call], schema)
    jsonschema.validate([{"name": "f", "arguments": {}}] * max_calls, schema)
    for wrong in ([], [call] * (max_calls + 1), [{**call, "name": "h"}], [{**call, "arguments": {"name": 5}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_auto_leaves_the_answer_free_and_looks_for_calls() -> None:
    parsed = chat(tools=[tool("f")], parallel_tool_calls=False)

    assert parsed.decode.response_schema == ""
    assert parsed.tools is not None and parsed.tools.max_calls == 1


def test_fields_that_say_no_are_heard_beside_a_field_that_asks_for_nothing() -> None:
    fields: dict[str, Any] = {"tools": [tool("f")], "modalities": ["text"]}

    assert chat(**fields, tool_choice="none").tools is None
    calls = chat(**fields, tool_choice="required", parallel_tool_calls=False).tools
    assert calls is not None and calls.max_calls == 1


def test_a_schema_of_many_paths_is_checked_at_once() -> None:
    twice = {f"A{level}": {"anyOf": [{"$ref": f"#/$defs/A{level + 1}"}] * 2} for level in range(30)}

    with pytest.raises(InvalidInputError) as caught:
        chat(response_format=schema_format({"$defs": {**twice, "A30": {"type": 5}}, "$ref": "#/$defs/A0"}))

    assert caught.value.code == "invalid_schema"
