"""HTTP rows of shared/cases (A01-A14 and some neighbours) through HTTP; depth is in services/ingress/tests."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx
import openai
import pytest

from fleet_cli.testing import RunningFleet, wait_for
from tests.support.cases import FAULT_WORD, MODEL, CaseClient, chunks_of, deltas_of, error_of

pytestmark = pytest.mark.e2e

WHOLE = "abSTOPcd\N{GRINNING FACE} ok"


def text_of(response: httpx.Response) -> tuple[str, str]:
    """Text and finish reason of an answer that was not streamed."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def test_a01_an_assistant_turn_of_tool_calls_needs_no_content(cases: CaseClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    counts = set()
    for content in ({"content": None}, {}):
        turns = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        response = cases.post(json.dumps({"model": MODEL, "messages": turns, "max_tokens": 1}).encode())
        assert response.status_code == 200, response.text
        counts.add(response.json()["usage"]["prompt_tokens"])

    assert len(counts) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "omnifleet-vlm", "messages": []}', "messages"),
        (b'{"model": "omnifleet-vlm"}', "messages"),
        (b"[]", None),
        (b"{", None),
        (b"", None),
    ],
)
def test_a03_bodies_without_messages_are_refused(cases: CaseClient, body: bytes, param: str | None) -> None:
    error = error_of(cases.post(body), 400)

    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a03_a_body_that_does_not_call_itself_json_is_refused(cases: CaseClient) -> None:
    error_of(cases.post(b'{"model": "omnifleet-vlm", "messages": []}', content_type="text/plain"), 415)


def test_a05_image_literals_in_user_text_stay_text(cases: CaseClient) -> None:
    body = {**json.loads((cases.files / "req/a05_user_token.json").read_bytes()), "model": MODEL}
    with_image = cases.post(json.dumps(body).encode())
    media = cases.seen(with_image)
    body["messages"][0]["content"] = body["messages"][0]["content"][:1]

    without = cases.post(json.dumps(body).encode())

    assert without.status_code == 200, without.text
    num_without = without.json()["usage"]["prompt_tokens"]
    assert with_image.json()["usage"]["prompt_tokens"] == num_without + media["num_tokens"]


def test_a07_nothing_of_a_stop_string_is_streamed(cases: CaseClient) -> None:
    streamed = cases.chat(stop=["STOP"], stream=True)
    whole = cases.chat(stop=["STOP"])

    assert "".join(deltas_of(streamed)) == "ab"
    assert not any("S" in delta for delta in deltas_of(streamed))
    assert chunks_of(streamed)[-1]["choices"][0]["finish_reason"] == "stop"
    assert text_of(whole) == ("ab", "stop")


def test_a07_a_beginning_that_is_no_stop_string_is_kept(cases: CaseClient) -> None:
    assert "".join(deltas_of(cases.chat(stop=["STOPPED"], stream=True))) == WHOLE


def test_a09_a_character_of_two_tokens_arrives_whole(cases: CaseClient) -> None:
    deltas = deltas_of(cases.chat(stream=True))

    assert "".join(deltas) == WHOLE
    assert "\ufffd" not in "".join(deltas)
    assert text_of(cases.chat()) == (WHOLE, "stop")


def test_a11_usage_comes_last_and_only_when_asked_for(cases: CaseClient) -> None:
    *before, last = chunks_of(cases.chat(stream=True, stream_options={"include_usage": True}))
    unasked = chunks_of(cases.chat(stream=True))

    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
    assert all(chunk["choices"] for chunk in unasked)
    error = error_of(cases.chat(stream=False, stream_options={"include_usage": True}), 400)
    assert error["param"] == "stream_options"


def test_a13_a_failure_in_mid_stream_is_one_error_event_and_no_done(cases: CaseClient) -> None:
    response = cases.chat(f"a{FAULT_WORD}", stream=True)

    assert b"[DONE]" not in response.content
    *before, last = chunks_of(response)
    assert last.keys() == {"error"}
    assert last["error"]["type"] == "server_error" and last["error"]["code"]
    assert "".join(choice["delta"].get("content") or "" for chunk in before for choice in chunk["choices"]) == "abSTOP"
    assert {choice["finish_reason"] for chunk in before for choice in chunk["choices"]} == {None}


def test_a13_the_official_client_raises_in_mid_stream(case_fleet: RunningFleet) -> None:
    client = openai.OpenAI(base_url=f"{case_fleet.url}/v1", api_key="none", max_retries=0, timeout=30)
    message: Any = {"role": "user", "content": f"a{FAULT_WORD}"}
    texts = []

    with pytest.raises(openai.APIError):
        for chunk in client.chat.completions.create(model=MODEL, messages=[message], stream=True):
            texts.append(chunk.choices[0].delta.content or "")

    assert "".join(texts) == "abSTOP"


def test_a13_a_stream_goes_on_when_the_only_decode_worker_is_killed_and_comes_back(
    cases: CaseClient, case_fleet: RunningFleet
) -> None:
    victim = case_fleet.stack()["processes"]["decode-0"]["pid"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    lines: list[str] = []
    begun_s = time.monotonic()
    with httpx.stream("POST", f"{case_fleet.url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if len(lines) == 3:
                os.kill(victim, signal.SIGKILL)

    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == WHOLE
    assert time.monotonic() - begun_s < 30.0
    wait_for(lambda: cases.chat(max_tokens=1).status_code == 200, 20.0, "it answers again")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a17_limits_of_both_names_are_kept(cases: CaseClient, field: str) -> None:
    assert text_of(cases.chat(**{field: 2})) == ("abSTO", "length")


def test_a17_null_limits_count_as_absent_and_two_that_differ_are_refused(cases: CaseClient) -> None:
    assert text_of(cases.chat(max_tokens=None, max_completion_tokens=None)) == (WHOLE, "stop")
    error = error_of(cases.chat(max_tokens=3, max_completion_tokens=5), 400)
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a19_a_prompt_and_its_answer_fit_or_are_refused_never_clipped(cases: CaseClient, is_stream: bool) -> None:
    num_tokens = cases.post(
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode(), "/v1/tokenize"
    ).json()["count"]
    room = 8192 - num_tokens

    fits = cases.chat(max_tokens=room, stream=is_stream)
    error = error_of(cases.chat(max_tokens=room + 1, stream=is_stream), 400)

    assert fits.status_code == 200
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"] and str(num_tokens) in error["message"]


def test_a19_a_prompt_above_the_context_is_refused_with_both_counts(cases: CaseClient) -> None:
    for text in ("word " * 9000, "word " * 4_000_000):
        error = error_of(cases.chat(text, stream=True), 400)

        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "8192" in error["message"]


def test_a19_prompts_of_many_megabytes_do_not_hold_up_others(cases: CaseClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a b " * 6_000_000}]}
    begun_s = time.monotonic()

    for _ in range(4):
        error_of(cases.post(json.dumps(body).encode()), 400)

    assert text_of(cases.chat()) == (WHOLE, "stop")
    assert time.monotonic() - begun_s < 15.0


@pytest.mark.parametrize(("model", "status"), [("nope", 404), ("a/b.c", 404), ("", 400), (None, 400)])
def test_a20_an_unknown_model_is_named(cases: CaseClient, model: str | None, status: int) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}

    assert error_of(cases.post(json.dumps(body).encode()), status)["param"] == "model"


def test_a29_a_lone_surrogate_is_refused(cases: CaseClient) -> None:
    error = error_of(cases.post((cases.files / "req/a29_lone_surrogate.json").read_bytes()), 400)

    assert (error["code"], error["param"]) == ("invalid_unicode", "messages[0].content")


def test_a38_every_chunk_of_a_stream_is_complete(cases: CaseClient) -> None:
    response = cases.chat(stream=True)
    chunks = chunks_of(response)

    assert response.content.endswith(b"data: [DONE]\n\n")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {(chunk["object"], chunk["model"], chunk["id"], chunk["created"]) for chunk in chunks} == {
        ("chat.completion.chunk", MODEL, chunks[0]["id"], chunks[0]["created"])
    }
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
