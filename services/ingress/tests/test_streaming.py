"""Server-sent events, byte by byte (cases A07, A09, A11, A13, A38)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from fleet_contracts.decode import TokenAlternative, TokenLogprob
from fleet_contracts.events import Failure
from fleet_ingress.testing import TEXT_MODEL, Script, open_rig

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
SERVER_FAILURE = Failure(error_type="server_error", code="engine_dead", message="CUDA in /opt/x.py", status=500)
BAD_IMAGE = Failure(
    error_type="invalid_request_error",
    code="invalid_image",
    message="The picture is cut short.",
    status=400,
    param="messages[0].content[1].image_url",
)


async def raw_stream(script: Script, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    async with open_rig(lambda _body: script) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        return await http.post(path, json=body)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event but `[DONE]`."""
    blocks = answer.content.split(b"\n\n")
    assert blocks.pop() == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [json.loads(block[6:].decode()) for block in blocks if block != b"data: [DONE]"]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_stream_has_the_exact_frame_clients_expect() -> None:
    answer = await raw_stream(Script(), BODY)

    events = events_of(answer)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "Hello world"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]
    for event in events:
        assert (event["object"], event["model"]) == ("chat.completion.chunk", TEXT_MODEL)
        assert {"id", "created", "choices"} <= set(event)
        assert "usage" not in event


async def test_usage_comes_only_when_asked_for_in_a_chunk_without_choices() -> None:
    answer = await raw_stream(Script(), {**BODY, "stream_options": {"include_usage": True}})

    *others, last = events_of(answer)
    assert all(event["usage"] is None and event["choices"] for event in others)
    assert last["choices"] == []
    assert tuple(last["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")) == (7, 2, 9)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_text_passes_through_as_decode_lets_it_go(is_stream: bool) -> None:
    script = Script(pieces=(b"\xf0\x9f", b"\x98\x80", b" ok"))

    answer = await raw_stream(script, {**BODY, "stream": is_stream})

    whole = text_of(events_of(answer)) if is_stream else answer.json()["choices"][0]["message"]["content"]
    assert whole == "\U0001f600 ok"
    assert "�" not in answer.text


async def test_bad_input_is_a_400_and_no_stream() -> None:
    answer = await raw_stream(Script(refuse=BAD_IMAGE), BODY)

    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert ("invalid_image", BAD_IMAGE.param) == tuple(answer.json()["error"][key] for key in ("code", "param"))


async def test_failure_in_mid_stream_is_one_error_event_then_the_end_of_the_connection() -> None:
    script = Script(pieces=(b"a", b"b", b"c", b"d"), fail=SERVER_FAILURE, fail_at=3)

    answer = await raw_stream(script, BODY)

    *shown, last = events_of(answer)
    assert text_of(shown) == "abc"
    assert [last["error"][key] for key in ("type", "code")] == ["server_error", "engine_dead"]
    assert "CUDA" not in answer.text
    assert b"[DONE]" not in answer.content
    assert all(event["choices"][0]["finish_reason"] is None for event in shown)
    assert answer.headers.get("connection", "close") == "close"


async def test_openai_client_raises_on_failure_in_mid_stream() -> None:
    script = Script(pieces=(b"a", b"b"), fail=SERVER_FAILURE, fail_at=1)
    async with (
        open_rig(lambda _body: script) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x") as client,
    ):
        stream = await client.chat.completions.create(**BODY)
        with pytest.raises(openai.APIError):
            async for _chunk in stream:
                pass


async def test_failure_before_the_first_token_has_its_status_and_hides_server_texts() -> None:
    answer = await raw_stream(Script(fail=SERVER_FAILURE), BODY)

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
    assert "CUDA" not in answer.text


async def test_choices_are_interleaved_by_index() -> None:
    answer = await raw_stream(Script(), {**BODY, "n": 2})

    events = events_of(answer)
    assert [text_of(events, 0), text_of(events, 1)] == ["Hello world", "Hello world"]
    firsts = [event["choices"][0] for event in events if "role" in event["choices"][0]["delta"]]
    assert [choice["index"] for choice in firsts] == [0, 1]


async def test_length_limit_shows_as_finish_reason() -> None:
    answer = await raw_stream(Script(finish_reason="length"), {**BODY, "max_completion_tokens": 2, "stream": False})

    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_logprobs_have_openai_shape(is_stream: bool) -> None:
    script = Script(pieces=(b"\xc3", b"\xa9"), logprobs=(_logprob(b"\xc3"), _logprob(b"\xa9")))
    body = {**BODY, "logprobs": True, "top_logprobs": 1, "stream": is_stream}

    answer = await raw_stream(script, body)

    if is_stream:
        shown = [event["choices"][0]["logprobs"] for event in events_of(answer)]
        content = [entry for block in shown if block is not None for entry in block["content"]]
    else:
        content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [["x"], ["x"]]


async def test_completion_route_has_its_own_shape_and_echo() -> None:
    body = {"model": TEXT_MODEL, "prompt": "Once", "echo": True}
    whole = (await raw_stream(Script(), body, "/v1/completions")).json()
    streamed = events_of(await raw_stream(Script(), {**body, "stream": True}, "/v1/completions"))

    assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "OnceHello world")
    assert "".join(event["choices"][0]["text"] for event in streamed) == "OnceHello world"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["id"].startswith("cmpl-")


async def test_completion_logprobs_have_parallel_lists() -> None:
    script = Script(pieces=(b"ab", b"c"), logprobs=(_logprob(b"ab"), _logprob(b"c")))
    body = {"model": TEXT_MODEL, "prompt": "x", "logprobs": 1}

    answer = await raw_stream(script, body, "/v1/completions")

    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["ab", "c"]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"x": -1.0, "ab": -0.5}


def _logprob(piece: bytes) -> TokenLogprob:
    chosen = TokenAlternative(token=piece.decode("utf-8", "replace"), token_id=1, logprob=-0.5, bytes_=piece)
    others = tuple(TokenAlternative(token=word, token_id=2, logprob=-1.0, bytes_=b"x") for word in ("x", "y"))
    return TokenLogprob(chosen=chosen, top=others)
