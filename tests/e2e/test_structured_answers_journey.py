"""JSON answers, tools and token biases from the real model, through the official client."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
QUESTION = {"role": "user", "content": "What is the weather in Paris, in celsius?"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "nullable": {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}, "required": ["a"]},
    "choice": {"enum": ["red", "green", 3, None]},
    "tree": {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 8},
                    "next": {"anyOf": [{"type": "null"}, {"enum": ["leaf"]}]},
                },
                "required": ["name", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/Node",
    },
}


class City(pydantic.BaseModel):
    """What the parse helper of the client asks for."""

    name: str = pydantic.Field(max_length=20)
    country: Literal["France", "Spain", "Italy"]
    is_capital: bool


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """One greedy chat completion about the weather unless `fields` say otherwise."""
    body = {"model": MODEL, "messages": [QUESTION], "temperature": 0, "max_tokens": 120, **fields}
    return client.chat.completions.create(**body)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_obeys_its_schema(client: openai.OpenAI, name: str, temperature: float) -> None:
    answer = ask(client, response_format=schema_format(SCHEMAS[name]), temperature=temperature)

    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMAS[name])


def test_a_streamed_answer_obeys_its_schema_too(client: openai.OpenAI) -> None:
    chunks = ask(client, response_format=schema_format(SCHEMAS["flat"]), stream=True)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMAS["flat"])


def test_the_parse_helper_of_the_client_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris."}],
        temperature=0,
        max_tokens=120,
        response_format=City,
    )

    assert isinstance(answer.choices[0].message.parsed, City)


def test_json_object_gives_an_object_or_says_that_it_was_cut(client: openai.OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=300)

    text = answer.choices[0].message.content
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 3},
        {"type": "string", "pattern": "("},
        # Only compiling shows it.
        {"type": "string", "pattern": "(a|b|ab|.*c){1,500}x{3,900}"},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"$ref": "#"},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_a_schema_nobody_can_obey_is_a_400_and_hurts_nobody(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format=schema_format(schema))
    after = ask(client, max_tokens=2)

    assert refused.value.param == "response_format.json_schema.schema"
    assert refused.value.code == "invalid_schema"
    assert after.choices[0].message.content


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_forced_call_obeys_the_parameters(client: openai.OpenAI, choice: Any, is_stream: bool) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [QUESTION],
        "tools": [WEATHER],
        "tool_choice": choice,
        "temperature": 0,
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    if is_stream:
        with client.chat.completions.stream(**request) as stream:
            answer = stream.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**request).choices[0]

    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])


def test_required_chooses_among_several_functions(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[WEATHER, TIME], tool_choice="required", max_tokens=300).choices[0]

    assert answer.finish_reason in ("tool_calls", "length")
    for call in answer.message.tool_calls or ():
        assert call.function.name in ("get_weather", "get_time")
        assert isinstance(json.loads(call.function.arguments), dict)


def test_a_round_trip_of_call_result_and_answer(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    called = ask(client, tools=[WEATHER], tool_choice=named).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": '{"degrees": 21, "sky": "sunny"}'}

    messages = [QUESTION, called, result]
    answer = ask(client, messages=messages, tools=[WEATHER], tool_choice="none").choices[0]

    assert answer.message.content
    assert answer.message.tool_calls is None
    assert answer.finish_reason in ("stop", "length")


def test_auto_answers_or_calls_what_there_is(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[WEATHER]).choices[0]

    assert answer.message.content or answer.message.tool_calls
    assert all(call.function.name == "get_weather" for call in answer.message.tool_calls or ())


def test_a_bias_forbids_a_token_and_an_unknown_id_is_named(client: openai.OpenAI) -> None:
    first = ask(client, logprobs=True, top_logprobs=1, max_tokens=1)
    forbidden = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0)
    # Token ids are not shown by the API: forbid a range that holds the likeliest one, whatever it is.
    bias = {str(token_id): -100 for token_id in range(3000, 3300)}
    free = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, logit_bias=bias
    )
    forced = ask(client, logit_bias={"28": 100}, max_tokens=3)
    with pytest.raises(openai.BadRequestError) as unknown:
        ask(client, logit_bias={"2000000000": 1})

    assert first.choices[0].message.content and forbidden.choices[0].text and free.choices[0].text
    assert len(set(forced.choices[0].message.content)) == 1
    assert unknown.value.param == "logit_bias"
