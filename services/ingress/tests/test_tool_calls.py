"""Calls are found in the text of an answer, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_ingress.core.tool_calls import CallPiece, Piece, Shaper, TextPiece, make_shaper
from fleet_ingress.core.tools import ToolUse
from fleet_ingress.testing import TEXT_MODEL, Script, open_rig

_NAMES = frozenset({"add", "look"})
_AUTO = ToolUse(_NAMES)
_FORCED = ToolUse(_NAMES, is_forced=True)
_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
_LOOK = '<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"</tool_call>\\"}"}</tool_call>'

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "look"}},
]


def shaped(shaper: Shaper, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls of an answer that arrives in pieces."""
    made: list[Piece] = []
    for piece in pieces:
        made += shaper.push(piece)
    made += shaper.finish()
    calls: dict[int, list[str]] = {}
    for piece in made:
        if isinstance(piece, CallPiece):
            assert (piece.name is not None) == (piece.index not in calls)
            calls.setdefault(piece.index, [piece.name or "", ""])[1] += piece.arguments
    text = "".join(piece.text for piece in made if isinstance(piece, TextPiece))
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("Hello <b> world ", "Hello <b> world ", []),
        (_ADD, "", [("add", {"a": 1})]),
        (f"I add. \n{_ADD}\n{_LOOK}\n", "I add.", [("add", {"a": 1}), ("look", {"at": "</tool_call>"})]),
        (_ADD.removesuffix("</tool_call>"), "", [("add", {"a": 1})]),
        (
            '<tool_call>[{"name": "add"}, {"name": "look", "arguments": {}}]</tool_call>',
            "",
            [("add", {}), ("look", {})],
        ),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
        ("<tool_call>{broken}</tool_call> so", None, []),
        ("<tool_call>[]</tool_call>", None, []),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "argu', None, []),
        ("a < b <tool", None, []),
    ],
)
@given(data=st.data())
def test_tagged_calls_are_found_wherever_the_text_is_cut(
    answer: str, text: str | None, calls: list[Any], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]

    assert shaped(make_shaper(_AUTO), pieces) == (answer if text is None else text, calls)


@given(data=st.data())
def test_a_forced_list_gives_its_calls_wherever_it_is_cut(data: st.DataObject) -> None:
    answer = '[{"name": "add","arguments": {"s": "}]"}}, {"name": "look","arguments": {}}]'
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]

    assert shaped(make_shaper(_FORCED), pieces) == ("", [("add", {"s": "}]"}), ("look", {})])


def test_a_forced_list_that_was_cut_short_keeps_what_was_whole() -> None:
    text, calls = shaped(make_shaper(_FORCED), ['[{"name": "add","arguments": {}}, {"name": "lo'])

    assert calls == [("add", {})]
    assert "lo" in text


def test_calls_beyond_the_allowed_number_are_dropped() -> None:
    assert shaped(make_shaper(ToolUse(_NAMES, max_calls=1)), [_ADD, _LOOK]) == ("", [("add", {"a": 1})])


def test_arguments_of_a_named_function_are_passed_on_as_they_come() -> None:
    shaper = make_shaper(ToolUse(_NAMES, forced_name="add"))

    assert shaper.push('{"a"') == [CallPiece(0, '{"a"', "add")]
    assert shaper.push(":1}") == [CallPiece(0, ":1}")]


async def test_whole_and_streamed_answers_hold_the_same_calls_in_the_shape_of_openai() -> None:
    script = Script(pieces=[b"Sure. ", *(bytes([byte]) for byte in _ADD.encode()), _LOOK.encode()])
    request: dict[str, Any] = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with (
        open_rig(lambda _body: script) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x") as client,
    ):
        whole = (await client.chat.completions.create(**request)).choices[0]
        async with client.chat.completions.stream(**request) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]

    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.message.content == streamed.message.content == "Sure."
    for choice in (whole, streamed):
        assert choice.message.tool_calls is not None
        made = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert made == [("add", {"a": 1}), ("look", {"at": "</tool_call>"})]
        assert all(call.id.startswith("call_") and call.type == "function" for call in choice.message.tool_calls)
        assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_content_is_null_when_there_are_only_calls() -> None:
    request: dict[str, Any] = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with (
        open_rig(lambda _body: Script(pieces=[_ADD.encode()])) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x") as client,
    ):
        whole = (await client.chat.completions.create(**request)).choices[0]
        stream = await client.chat.completions.create(**request, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]

    assert whole.message.content is None
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas if delta.content] == []
