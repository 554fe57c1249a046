"""Pipelines and spoken answers over scripted workers: what steps are asked, what clients get, what stops whom."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleet_common.errors import InvalidInputError
from fleet_contracts import codec
from fleet_contracts.audio import TRANSCRIPT_MEDIA_TYPE, TranscriptHead, TranscriptSegment, pcm_media_type
from fleet_contracts.events import Failure
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.core.pipeline_file import read_pipeline
from fleet_ingress.core.pipeline_requests import (
    Asked,
    Value,
    asked_of,
    chat_body,
    image_body,
    speech_body,
    transcription_form,
)
from fleet_ingress.testing import IMAGE_MODEL, SPEECH_MODEL, TEXT_MODEL, VOICE_MODEL, Script, eventually, open_rig

CHAT = "/v1/chat/completions"
SOUND = base64.b64encode(b"RIFF").decode()
ASSISTANT = f"""\
pipeline: assistant
inputs: [audio]
steps:
  - id: hear
    stage: transcribe
    model: {SPEECH_MODEL}
    inputs: {{audio: input.audio}}
    params: {{language: en}}
  - id: answer
    stage: chat
    model: {TEXT_MODEL}
    inputs: {{text: hear.text, history: input.history}}
    params: {{system: Be brief., prompt: "They said: {{text}}", max_tokens: 20, temperature: 0}}
  - id: say
    stage: speak
    model: {VOICE_MODEL}
    inputs: {{text: answer.text}}
    params: {{speed: 1.5}}
    stream: [text]
outputs:
  text: answer.text
  audio: say.audio
"""
DRAWING = f"""\
pipeline: draw
inputs: [text]
steps:
  - id: draw
    stage: draw
    model: painter
    inputs: {{text: input.text}}
    params: {{prompt: "{{text}}, in oil", size: 64x64, seed: 7}}
  - id: caption
    stage: chat
    model: {IMAGE_MODEL}
    inputs: {{image: draw.image}}
    params: {{prompt: "What is it?"}}
outputs:
  image: draw.image
  text: caption.text
"""


def pcm(text: str) -> bytes:
    """What the scripted voice makes of a sentence: its letters, so that a test can read what was said, and when."""
    return text.encode().ljust(64)


def scripted(body: Mapping[str, Any]) -> Script:
    if "messages" in body:
        return Script(pieces=(b"It is", b" Paris.", b" Ask", b" again!"))
    if body["file"] == b"RIFF":
        segment = TranscriptSegment(text=" What is it?", start_s=0.0, end_s=1.0)
        parts = (TranscriptHead(language="en", duration_s=1.0), segment)
        return Script(media=[(TRANSCRIPT_MEDIA_TYPE, codec.encode(part)) for part in parts])
    return Script(media=[(pcm_media_type(24_000), pcm(body["file"].decode()))])


def folder(tmp_path: Path, *texts: str) -> Path:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    return tmp_path


def said(text: str = "") -> dict[str, Any]:
    sound = {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}
    part = {"type": "text", "text": text} if text else sound
    return {"model": "assistant", "messages": [{"role": "user", "content": [part]}]}


def request(**fields: Any) -> ChatRequest:
    return msgspec.convert({**said(), **fields}, ChatRequest)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def posted(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        return await client.post(CHAT, json=body, headers=headers)


def test_each_step_asks_for_what_its_file_says() -> None:
    pipeline = read_pipeline(ASSISTANT, "a.yaml")
    hear, answer, say = pipeline.steps
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    asked = asked_of(
        request(messages=[*earlier, *said()["messages"]], priority="batch", audio={"voice": "v"}), pipeline
    )

    form = transcription_form(hear, asked.inputs, asked)
    chat = json.loads(chat_body(answer, {"text": Value(text="Why?")}, asked, is_answering=True))
    speech = json.loads(speech_body(say, "Because.", asked))

    assert dict(form.fields) == {"model": SPEECH_MODEL, "language": "en", "priority": "batch"}
    assert form.files[0][1].data == b"RIFF"
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        *earlier,
        {"role": "user", "content": "They said: Why?"},
    ]
    assert (chat["model"], chat["max_tokens"], chat["priority"]) == (TEXT_MODEL, 20, "batch")
    assert (speech["input"], speech["voice"], speech["speed"]) == ("Because.", "v", 1.5)


def test_what_the_client_says_of_sampling_wins_and_is_for_the_step_that_answers() -> None:
    pipeline = read_pipeline(ASSISTANT, "a.yaml")
    asked = asked_of(request(temperature=1.0, max_completion_tokens=3, seed=4), pipeline)
    values = {"text": Value(text="Why?")}

    answering = json.loads(chat_body(pipeline.steps[1], values, asked, is_answering=True))
    other = json.loads(chat_body(pipeline.steps[1], values, asked, is_answering=False))

    assert (answering["temperature"], answering["max_completion_tokens"], answering["seed"]) == (1.0, 3, 4)
    assert "max_tokens" not in answering
    assert (other["temperature"], other["max_tokens"]) == (0, 20)


def test_a_picture_goes_from_step_to_step() -> None:
    draw, caption = read_pipeline(DRAWING, "d.yaml").steps

    image = json.loads(image_body(draw, {"text": Value(text="a cat")}, Asked()))
    chat = json.loads(chat_body(caption, {"image": Value(images=("data:x",))}, Asked(), is_answering=True))

    assert image == {"model": "painter", "prompt": "a cat, in oil", "size": "64x64", "seed": 7}
    assert chat["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:x"}},
        {"type": "text", "text": "What is it?"},
    ]


_VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": said("Hello")["messages"]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": said()["messages"][0]["content"] * 2}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [_VIDEO]}]}, "messages[0].content[0]"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ],
)
def test_what_a_pipeline_cannot_take_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        asked_of(request(**fields), read_pipeline(ASSISTANT, "a.yaml"))

    assert caught.value.param == param


@pytest.mark.parametrize("data", ["", "no base64!"])
def test_a_sound_that_is_none_is_refused(data: str) -> None:
    content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    with pytest.raises(InvalidInputError) as caught:
        asked_of(request(messages=[{"role": "user", "content": content}]), read_pipeline(ASSISTANT, "a.yaml"))

    assert caught.value.param == "messages[0].content[0].input_audio.data"


def test_only_what_speaks_takes_a_voice() -> None:
    for fields in ({"audio": {"voice": "x"}}, {"modalities": ["text", "audio"]}):
        with pytest.raises(InvalidInputError):
            asked_of(request(**{**said("a cat"), **fields}), read_pipeline(DRAWING, "d.yaml"))


async def test_a_pipeline_is_a_model_that_hears_answers_and_speaks(tmp_path: Path) -> None:
    async with open_rig(scripted, pipelines_dir=folder(tmp_path, ASSISTANT, DRAWING)) as rig:
        answer = await posted(rig.url, {**said(), "audio": {"format": "pcm16"}})
        async with httpx.AsyncClient(base_url=rig.url) as client:
            listed = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
            unlisted = await client.get("/v1/models/draw")
        refused = await posted(rig.url, {**said("a cat"), "model": "draw"})

    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == "It is Paris. Ask again!"
    assert base64.b64decode(message["audio"]["data"]) == pcm("It is Paris.") + pcm("Ask again!")
    assert rig.fleet.bodies[1]["messages"][-1]["content"] == "They said: What is it?"
    assert answer.json()["usage"]["completion_tokens"] == 4
    steps = [pair.partition("=")[0] for pair in answer.headers["x-fleet-step-request-ids"].split(", ")]
    assert steps == ["hear", "answer", "say", "say"]
    assert (listed["assistant"]["input_modalities"], listed["assistant"]["output_modalities"]) == (
        ["audio"],
        ["text", "audio"],
    )
    assert listed["assistant"]["voices"] == ["heart", "alloy"]
    # Nobody serves the painter: it is not offered, and whoever asks for it is told why.
    assert "draw" not in listed
    assert (unlisted.json()["state"], refused.status_code) == ("failed", 503)
    assert "painter" in refused.json()["error"]["message"]


async def test_an_answer_is_spoken_while_it_is_written() -> None:
    heard = asyncio.Event()

    async def wait(index: int) -> None:
        if index == 3:
            async with asyncio.timeout(5):
                await heard.wait()

    def script(body: Mapping[str, Any]) -> Script:
        found = scripted(body)
        return dataclasses.replace(found, before_token=wait) if "messages" in body else found

    body = {
        "model": TEXT_MODEL,
        "messages": [{"role": "user", "content": "Where?"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = ""
    async with (
        open_rig(script) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=10) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        async for piece in answer.aiter_text():
            text += piece
            # The last word is only written once the first sentence was heard.
            if '"data":"' in text:
                heard.set()

    chunks = events(text)
    spoken = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("transcript", "") for delta in spoken) == "It is Paris. Ask again!"
    sound = b"".join(base64.b64decode(delta.get("data", "")) for delta in spoken)
    assert sound == pcm("It is Paris.") + pcm("Ask again!")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "expires_at" in spoken[-2] and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert text.endswith("data: [DONE]\n\n")
    # The chat itself is an ordinary one.
    assert rig.fleet.bodies[0] == {"model": TEXT_MODEL, "messages": body["messages"]}


async def test_a_spoken_answer_is_refused_before_any_work() -> None:
    body = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]}
    async with open_rig(scripted) as rig:
        voice = await posted(rig.url, {**body, "audio": {"voice": "nobody", "format": "wav"}})
        kind = await posted(rig.url, {**body, "audio": {"format": "midi"}})
        model = await posted(rig.url, {**body, "model": "nobody"})
        alone = await posted(rig.url, {**body, "modalities": ["text"], "audio": {"format": "wav"}})

    assert [answer.status_code for answer in (voice, kind, model, alone)] == [400, 400, 404, 400]
    params = [answer.json()["error"]["param"] for answer in (voice, kind, model, alone)]
    assert params == ["audio.voice", "audio.format", "model", "audio"]
    assert rig.fleet.bodies == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_step_that_fails_ends_the_request_once_and_says_which(tmp_path: Path, is_stream: bool) -> None:
    failure = Failure(error_type="invalid_request_error", code="too_long", message="Too long.", status=400)

    def script(body: Mapping[str, Any]) -> Script:
        found = scripted(body)
        return dataclasses.replace(found, fail=failure, fail_at=2) if "messages" in body else found

    async with open_rig(script, pipelines_dir=folder(tmp_path, ASSISTANT)) as rig:
        answer = await posted(rig.url, {**said(), "stream": is_stream})
        await eventually(lambda: not rig.ingress.dispatcher.live and rig.fleet.num_running == 0)

    last = events(answer.text)[-1] if is_stream else answer.json()
    assert answer.status_code == (200 if is_stream else 400)
    assert last["error"] == {
        "message": "Step `answer`: Too long.",
        "type": "invalid_request_error",
        "param": None,
        "code": "too_long",
    }
    assert "[DONE]" not in answer.text


async def test_a_client_that_leaves_stops_every_step(tmp_path: Path) -> None:
    async def never(index: int) -> None:
        if index == 3:
            await asyncio.sleep(30)

    def script(body: Mapping[str, Any]) -> Script:
        found = scripted(body)
        return dataclasses.replace(found, before_token=never) if "messages" in body else found

    async with open_rig(script, pipelines_dir=folder(tmp_path, ASSISTANT)) as rig:
        body = {**said(), "stream": True}
        async with (
            httpx.AsyncClient(base_url=rig.url, timeout=10) as client,
            client.stream("POST", CHAT, json=body) as answer,
        ):
            async for _ in answer.aiter_text():
                break
        await eventually(lambda: not rig.ingress.dispatcher.live)
        await eventually(lambda: rig.ingress.gate.num_inflight == 0)


async def test_an_answer_without_a_word_is_no_speech() -> None:
    body = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]}
    async with open_rig(lambda _: Script(pieces=(b"...",))) as rig:
        answer = await posted(rig.url, body)

    message = answer.json()["choices"][0]["message"]
    assert (message["audio"]["transcript"], message["audio"]["data"]) == ("...", "")


async def test_a_pipeline_can_be_a_line_of_a_job(tmp_path: Path) -> None:
    async with (
        open_rig(scripted, pipelines_dir=folder(tmp_path, ASSISTANT)) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=10) as client,
    ):
        job = (await client.post("/v1/jobs", json={"endpoint": CHAT, "body": said()})).json()["id"]
        result = await client.get(f"/v1/jobs/{job}/result")
        async with asyncio.timeout(10):
            while result.status_code in (202, 409):
                await asyncio.sleep(0.05)
                result = await client.get(f"/v1/jobs/{job}/result")

    assert result.json()["choices"][0]["message"]["content"] == "It is Paris. Ask again!", result.text


async def test_an_idempotency_key_gets_one_run(tmp_path: Path) -> None:
    async with open_rig(scripted, pipelines_dir=folder(tmp_path, ASSISTANT)) as rig:
        first = await posted(rig.url, said(), **{"Idempotency-Key": "k"})
        again = await posted(rig.url, said(), **{"Idempotency-Key": "k"})

    assert first.json() == again.json()
    assert sum("messages" in body for body in rig.fleet.bodies) == 1


async def test_files_that_come_and_go_are_followed(tmp_path: Path) -> None:
    def states(check: Callable[[dict[str, str]], bool]) -> Callable[[], bool]:
        def look() -> bool:
            shelf = rig.ingress.pipelines.shelf
            return check({**dict.fromkeys(shelf.pipelines(), "ready"), **shelf.refused()})

        return look

    async with open_rig(scripted, pipelines_dir=tmp_path) as rig:
        unknown = await posted(rig.url, said())
        (tmp_path / "good.yaml").write_text(ASSISTANT)
        (tmp_path / "bad.yaml").write_text(ASSISTANT.replace("stage: chat", "stage: chant"))
        await eventually(states(lambda found: found.keys() == {"assistant", "bad"}))
        good, bad = await posted(rig.url, said()), await posted(rig.url, {**said(), "model": "bad"})
        async with httpx.AsyncClient(base_url=rig.url) as client:
            cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}

    assert (unknown.status_code, good.status_code, bad.status_code) == (404, 200, 503)
    assert cards["bad"]["state"] == "failed"
    assert cards["bad"]["error"].startswith("bad.yaml:10: `stage` is one of")
    assert "bad.yaml:10: " in bad.json()["error"]["message"]
