"""What bodies are taken, and which field a refusal names (cases A01, A03, A17, A29, S13)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_common.errors import InvalidInputError, UnsupportedModalityError
from fleet_contracts.base import Modality, PriorityClass, Stage, StepId
from fleet_contracts.control import ModelCard
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.completions import CompletionRequest
from fleet_ingress.api.decode import decode_request
from fleet_ingress.core.parsed import ParsedRequest, check_against_card, parse_chat, parse_completion
from fleet_ingress.core.plan import make_plan

_USER = {"role": "user", "content": "hi"}
_VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
_AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": [_USER], **fields}
    return parse_chat(decode_request(json.dumps(body).encode(), ChatRequest), max_choices=4)


def completion(**fields: Any) -> ParsedRequest:
    body = {"model": "m", "prompt": "once", **fields}
    return parse_completion(decode_request(json.dumps(body).encode(), CompletionRequest), max_choices=4)


def _sent(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def _audio(**fields: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {**_AUDIO["input_audio"], **fields}}


def refusal(**fields: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize("turn", [{"content": None}, {}], ids=["null", "absent"])
def test_assistant_turn_with_tool_calls_needs_no_content(turn: dict[str, Any]) -> None:
    messages = [
        _USER,
        {"role": "assistant", "tool_calls": [_CALL], **turn},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]

    assert chat(messages=messages).route == "chat"


def test_answer_of_the_openai_client_can_be_sent_back_as_a_turn() -> None:
    turn = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }

    assert chat(messages=[_USER, turn, _USER]).route == "chat"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [_USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        (_sent({"type": "input_audio"}), "messages[0].content[0].input_audio"),
        (_sent({"type": "input_audio", "input_audio": {"data": "AA"}}), "messages[0].content[0].input_audio.format"),
        (_sent(_audio(format="ogg")), "messages[0].content[0].input_audio.format"),
        (_sent(_audio(data="")), "messages[0].content[0].input_audio.data"),
        (_sent(_audio(data=[1])), "messages[0].content[0].input_audio.data"),
        (_sent(_audio(url="x")), "messages[0].content[0].input_audio.url"),
        ({"messages": [{"role": "system", "content": [_AUDIO]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].video_url"),
        ({"messages": [{"role": "system", "content": [_IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": [_VIDEO]}]}, "messages[0].content[0]"),
        (_sent({**_VIDEO, "video_url": {"url": "ftp://a/b.mp4"}}), "messages[0].content[0].video_url"),
        (_sent({**_VIDEO, "video_url": {"url": "data:,", "fps": 2}}), "messages[0].content[0].video_url.fps"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a"}}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 3, "min_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {"2147483648": 1}}, "logit_bias"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(301)}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{% for a in range(9) %}{% endfor %}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert param == refusal(**fields).param


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "max_completion_tokens": None, "stop": None, "tools": None, "nonsense": None},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}},
        {"modalities": ["text"], "parallel_tool_calls": True, "function_call": "auto"},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "request_id": "mine"},
    ],
    ids=["null", "ask for nothing", "defaults", "bookkeeping"],
)
def test_fields_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert chat() == chat(**fields)


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}]
)
def test_either_name_of_the_token_limit_counts(fields: dict[str, Any]) -> None:
    parsed = chat(**fields)

    assert (parsed.decode.max_tokens, parsed.preprocess.max_new_tokens) == (3, 3)


def test_sampling_fields_reach_the_decode_step() -> None:
    decode = chat(
        seed=7, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, stop="x", n=2, logprobs=True, stop_token_ids=[1]
    ).decode

    assert (decode.seed, decode.temperature, decode.top_p, decode.top_k, decode.min_p) == (7, 0.0, 0.5, 0, 0.1)
    assert (decode.stop, decode.n, decode.logprobs, decode.stop_token_ids) == (("x",), 2, 0, (1,))


def test_logit_bias_reaches_the_decode_step() -> None:
    assert chat(logit_bias={"5": -100, "0": 2.5}).decode.logit_bias == {5: -100.0, 0: 2.5}
    assert completion(logit_bias={"7": 1}).decode.logit_bias == {7: 1.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PriorityClass.REALTIME),
        ({"service_tier": "flex"}, PriorityClass.BATCH),
        ({"service_tier": "priority"}, PriorityClass.REALTIME),
        ({"priority": "background", "service_tier": "flex"}, PriorityClass.BACKGROUND),
    ],
)
def test_priority_class_follows_tier_and_priority(fields: dict[str, Any], expected: PriorityClass) -> None:
    assert expected == chat(**fields).priority_class


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"null", b"{} {}", b"\xff", b"[" * 100_000], ids=lambda body: repr(body[:4])
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInputError) as caught:
        decode_request(body, ChatRequest)

    assert caught.value.code in ("invalid_json", "invalid_value", "missing_required_parameter")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model":"m","messages":[{"role":"user","content":"a\ud800b"}]}', "messages[0].content"),
        (rb'{"model":"\udc00","messages":[]}', "model"),
        (rb'{"model":"m","messages":[],"stop":["\ud83d"]}', "stop[0]"),
    ],
)
def test_lone_surrogate_is_refused_with_its_place(body: bytes, param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        decode_request(body, ChatRequest)

    assert ("invalid_unicode", param) == (caught.value.code, caught.value.param)


def test_surrogate_pair_is_text() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":"\ud83d\ude00"}]}'

    assert decode_request(body, ChatRequest).messages[0].content == "\U0001f600"


def test_no_refusal_shows_a_class_name() -> None:
    words = str(refusal(messages=[{"role": "user", "content": [{"type": "nope"}]}]))

    assert "ChatMessage" not in words
    assert "Part" not in words


def test_completion_defaults_and_prompt_forms() -> None:
    assert completion().decode.max_tokens == 16
    assert completion(prompt=["once"], echo=True).echo_text == "once"
    assert completion(prompt=[1, 2]).route == "completion"
    for prompt in ([], ["a", "b"], [1, "b"], [[1]], [True]):
        with pytest.raises(InvalidInputError):
            completion(prompt=prompt)


def test_each_picture_is_its_own_encode_step() -> None:
    parsed = chat(messages=[{"role": "user", "content": [_IMAGE, {"type": "text", "text": "?"}, _IMAGE]}])

    plan = make_plan(parsed)

    assert [part.param for part in parsed.media] == [
        "messages[0].content[0].image_url",
        "messages[0].content[2].image_url",
    ]
    assert [step.step_id for step in plan.steps] == ["pre", "enc0", "enc1", "dec"]
    assert plan.steps[-1].needs == ("pre", "enc0", "enc1")
    assert Stage.DECODE is plan.steps[-1].stage


def test_serial_execution_is_one_encode_step_for_all_pictures() -> None:
    messages = [{"role": "user", "content": [_IMAGE, _IMAGE, _IMAGE]}]

    serial = make_plan(chat(messages=messages, execution="serial"))

    assert [step.step_id for step in serial.steps] == ["pre", "enc0", "dec"]
    assert serial.steps[1].params == VisionParams(items=(0, 1, 2))
    assert serial.steps[-1].needs == ("pre", "enc0")
    assert make_plan(chat(messages=messages, execution="parallel")) == make_plan(chat(messages=messages))
    assert len(make_plan(chat(execution="serial")).steps) == 2


def test_recordings_and_pictures_are_encode_steps_in_the_order_of_their_parts() -> None:
    parsed = chat(messages=[{"role": "user", "content": [_AUDIO, _IMAGE, {"type": "text", "text": "?"}, _AUDIO]}])

    plan = make_plan(parsed)

    assert [(part.param, part.kind.value) for part in parsed.media] == [
        ("messages[0].content[0].input_audio", "audio"),
        ("messages[0].content[1].image_url", "image"),
        ("messages[0].content[3].input_audio", "audio"),
    ]
    assert {step.step_id: step.params for step in plan.steps[1:-1]} == {
        "enc0": AudioEncodeParams(items=(0,)),
        "enc1": VisionParams(items=(1,)),
        "enc2": AudioEncodeParams(items=(2,)),
    }
    assert plan.steps[-1].needs == ("pre", "enc0", "enc1", "enc2")
    assert plan.later_tags == {"audio_encode.v1"}


def test_a_video_is_one_encode_step_for_workers_that_know_it() -> None:
    plan = make_plan(chat(messages=[{"role": "user", "content": [_IMAGE, _VIDEO, {"type": "text", "text": "?"}]}]))

    assert [step.params for step in plan.steps[1:-1]] == [VisionParams(items=(0,)), VideoEncodeParams(items=(1,))]
    assert plan.later_tags == {"video_encode.v1"}


def test_serial_execution_is_one_encode_step_per_kind() -> None:
    messages = [{"role": "user", "content": [_AUDIO, _IMAGE, _AUDIO]}]

    serial = make_plan(chat(messages=messages, execution="serial"))

    assert [step.step_id for step in serial.steps] == ["pre", "enc0", "enc1", "dec"]
    assert serial.step(StepId("enc0")).params == AudioEncodeParams(items=(0, 2))


def test_recordings_need_a_model_that_takes_them() -> None:
    parsed = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, _AUDIO, _AUDIO]}])
    sighted = ModelCard(model="m", input_modalities=(Modality.TEXT, Modality.IMAGE), max_images=1)
    hearing = ModelCard(model="m", input_modalities=(Modality.TEXT, Modality.AUDIO), max_audios=1)

    with pytest.raises(UnsupportedModalityError) as caught:
        check_against_card(parsed, sighted)
    with pytest.raises(InvalidInputError) as too_many:
        check_against_card(parsed, hearing)

    assert (str(caught.value), caught.value.param) == (
        "This model takes no audio.",
        "messages[0].content[1].input_audio",
    )
    assert (too_many.value.code, too_many.value.param) == ("too_many_audios", "messages[0].content[2].input_audio")


def test_videos_need_a_model_that_takes_them() -> None:
    parsed = chat(messages=[{"role": "user", "content": [_VIDEO, _VIDEO]}])
    sighted = ModelCard(model="m", input_modalities=(Modality.TEXT, Modality.IMAGE), max_images=1)
    watching = ModelCard(model="m", input_modalities=(Modality.TEXT, Modality.IMAGE, Modality.VIDEO), max_images=1)

    with pytest.raises(UnsupportedModalityError) as caught:
        check_against_card(parsed, sighted)
    with pytest.raises(InvalidInputError) as too_many:
        check_against_card(parsed, watching)

    assert (str(caught.value), caught.value.param) == (
        "This model takes no videos.",
        "messages[0].content[0].video_url",
    )
    assert (too_many.value.code, too_many.value.param) == ("too_many_videos", "messages[0].content[1].video_url")


def test_pictures_need_a_model_that_takes_them() -> None:
    parsed = chat(messages=[{"role": "user", "content": [_IMAGE, _IMAGE]}])
    sighted = ModelCard(model="m", input_modalities=(Modality.TEXT, Modality.IMAGE), max_images=1)

    with pytest.raises(UnsupportedModalityError) as caught:
        check_against_card(parsed, ModelCard(model="m"))
    with pytest.raises(InvalidInputError) as too_many:
        check_against_card(parsed, sighted)

    assert caught.value.param == "messages[0].content[0].image_url"
    assert (too_many.value.code, too_many.value.param) == ("too_many_images", "messages[0].content[1].image_url")
