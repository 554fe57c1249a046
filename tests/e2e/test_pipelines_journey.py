"""Pipelines and spoken answers from real models, and files of pipelines that come and go."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import openai
import pytest
from PIL import Image

from fleet_cli.testing import RunningFleet, running_fleet, wait_for

pytestmark = pytest.mark.e2e
SPEAKING, HEARING, CHATTING, DRAWING = "hibari", "whisper-tiny.en", "omnifleet-vlm", "omnifleet-image"
SHIPPED = Path(__file__).parents[2] / "pipelines"
QUESTION = "What is the capital of France?"

ECHO = """\
pipeline: say-it-back
inputs: [audio]
steps:
  - id: hear
    stage: transcribe
    model: whisper-tiny.en
    inputs: {audio: input.audio}
  - id: say
    stage: speak
    model: hibari
    inputs: {text: hear.text}
outputs:
  audio: say.audio
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipelines that come along, where a test may add its own."""
    return Path(shutil.copytree(SHIPPED, tmp_path_factory.mktemp("pipelines") / "files"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[RunningFleet]:
    """All models are real."""
    settings = {
        "FLEET_CHAT_MODEL": CHATTING,
        "FLEET_TRANSCRIBE_MODEL": HEARING,
        "FLEET_SPEECH_MODEL": SPEAKING,
        "FLEET_IMAGE_MODEL": DRAWING,
        "FLEET_EMBEDDING_MODEL": "",
        "FLEET_SPEAK_REPLICAS": "2",
        "FLEET_PIPELINES": str(folder),
    }
    with running_fleet(tmp_path_factory.mktemp("pipeline_fleet"), settings, timeout_s=400.0) as fleet:
        names = {"voice-assistant", "describe-aloud", "illustrate"}
        wait_for(lambda: names <= states(fleet).keys() and set(states(fleet).values()) == {"ready"}, 400.0, "pipelines")
        yield fleet


@pytest.fixture
def client(fleet: RunningFleet) -> openai.OpenAI:
    """The official client, unmodified."""
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)


def cards(fleet: RunningFleet) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{fleet.url}/v1/models", timeout=10).json()["data"]
    return {card["id"]: card for card in found}


def states(fleet: RunningFleet) -> dict[str, str]:
    return {name: card["state"] for name, card in cards(fleet).items()}


def spoken(client: openai.OpenAI, text: str) -> str:
    """Base64 of a wav."""
    answer = client.audio.speech.create(model=SPEAKING, voice="alloy", input=text, response_format="wav")
    return base64.b64encode(answer.read()).decode()


def heard(client: openai.OpenAI, data: bytes, name: str = "answer.wav") -> str:
    return str(client.audio.transcriptions.create(model=HEARING, file=(name, data)).text)


def words(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).strip()


def audio_message(data: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]}]


def drawn_circle() -> str:
    """A red circle on blue, as the model that sees was taught shapes."""
    from PIL import ImageDraw

    picture = Image.new("RGB", (224, 224), (0, 0, 255))
    ImageDraw.Draw(picture).ellipse((52, 52, 172, 172), fill=(255, 0, 0))
    data = io.BytesIO()
    picture.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def test_pipelines_are_listed_with_what_they_take_and_give(fleet: RunningFleet) -> None:
    found = cards(fleet)

    shown = {name: (found[name]["input_modalities"], found[name]["output_modalities"]) for name in found}
    assert shown["voice-assistant"] == (["audio"], ["text", "audio"])
    assert shown["describe-aloud"] == (["image"], ["text", "audio"])
    assert shown["illustrate"] == (["text"], ["image", "text"])


def test_a_spoken_question_gets_a_spoken_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="voice-assistant",
        messages=audio_message(spoken(client, QUESTION)),
        audio={"voice": "alloy", "format": "wav"},
    )

    message = answer.choices[0].message
    assert message.audio is not None
    assert "Paris" in message.audio.transcript
    assert message.content == message.audio.transcript
    assert "Paris" in heard(client, base64.b64decode(message.audio.data))


def test_a_streamed_answer_is_heard_and_read(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=CHATTING,
            messages=[{"role": "user", "content": "Write five sentences about the sea."}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "pcm16"},
            max_tokens=160,
            temperature=0,
            stream=True,
        )
    )

    deltas = [chunk.choices[0].delta.model_dump().get("audio") or {} for chunk in chunks]
    sounds = [delta for delta in deltas if delta.get("data")]
    transcript = "".join(delta.get("transcript") or "" for delta in deltas)
    samples = b"".join(base64.b64decode(delta["data"]) for delta in deltas if delta.get("data"))
    assert len(transcript.split()) > 30
    assert sounds
    assert len({delta["id"] for delta in deltas if delta}) == 1
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    # 24 kHz, 16 bits: nobody says that many words faster.
    assert len(samples) / 48_000 > len(transcript.split()) / 6


def test_speech_is_asked_for_while_the_text_is_still_being_written(fleet: RunningFleet) -> None:
    """By the timelines of the steps: what a client hears first depends on the machine as well."""
    body = {
        "model": CHATTING,
        "messages": [{"role": "user", "content": "Write five sentences about the sea."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
        "max_tokens": 160,
        "temperature": 0,
    }
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=120)

    shown = [pair.split("=") for pair in answer.headers["x-fleet-step-request-ids"].split(", ")]
    steps = [httpx.get(f"{fleet.url}/v1/requests/{request_id}", timeout=10).json()["steps"] for _, request_id in shown]
    by_stage = {step["stage"]: step for rows in steps[:2] for step in rows}
    assert by_stage["audio_speak"]["queued_unix_s"] < by_stage["decode"]["finished_unix_s"]


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
def test_a_chat_is_answered_aloud_in_the_format_that_was_asked_for(client: openai.OpenAI, audio_format: Any) -> None:
    answer = client.chat.completions.create(
        model=CHATTING,
        messages=[{"role": "user", "content": QUESTION}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": audio_format},
        max_tokens=32,
        temperature=0,
    )

    message = answer.choices[0].message
    assert message.audio is not None
    assert message.content is None
    data = base64.b64decode(message.audio.data)
    with av.open(io.BytesIO(data)) as container:
        assert sum(frame.samples for frame in container.decode(audio=0)) > 0
    assert "Paris" in heard(client, data, f"answer.{audio_format}")


def test_a_picture_is_described_aloud(client: openai.OpenAI) -> None:
    content: list[Any] = [{"type": "image_url", "image_url": {"url": drawn_circle()}}]
    answer = client.chat.completions.create(model="describe-aloud", messages=[{"role": "user", "content": content}])

    message = answer.choices[0].message
    print(message.content)
    assert message.audio is not None and message.content is not None
    assert "circle" in message.content.lower()
    assert "circle" in heard(client, base64.b64decode(message.audio.data)).lower()


def test_a_prompt_becomes_a_picture_and_its_caption(fleet: RunningFleet) -> None:
    body = {
        "model": "illustrate",
        "messages": [{"role": "user", "content": "a red circle on a blue background"}],
    }
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=200)

    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    print(message["content"])
    (picture,) = message["images"]
    with Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].partition(",")[2]))) as opened:
        assert opened.format == "PNG" and min(opened.size) >= 32
    assert len(message["content"].split()) >= 2
    assert "draw=" in answer.headers["x-fleet-step-request-ids"]


def test_killed_speakers_cost_no_sentence(fleet: RunningFleet, client: openai.OpenAI) -> None:
    pids = [worker["pid"] for worker in fleet.workers("audio_speak")]
    assert len(pids) == 2
    stream = client.chat.completions.create(
        model=CHATTING,
        messages=[{"role": "user", "content": "Write five sentences about the sea."}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        max_tokens=120,
        temperature=0,
        stream=True,
    )
    transcript, samples = "", b""
    for chunk in stream:
        delta = chunk.choices[0].delta.model_dump().get("audio") or {}
        transcript += delta.get("transcript") or ""
        samples += base64.b64decode(delta.get("data") or "")
        if samples:
            # In the middle of the speech: whoever says the next sentence dies with it.
            while pids:
                os.kill(pids.pop(), signal.SIGKILL)

    assert not pids
    said, written = words(heard(client, as_wav(samples))), words(transcript)
    print(said, written, sep="\n")
    assert 0.7 < len(said.split()) / len(written.split()) < 1.3
    fleet.wait_workers("audio_speak", 2)


def as_wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(24_000)
        writer.writeframes(samples)
    return file.getvalue()


def test_a_file_that_is_added_is_served_without_a_restart(
    fleet: RunningFleet, client: openai.OpenAI, folder: Path
) -> None:
    before = fleet.stack()["processes"]["ingress"]["pid"]
    (folder / "echo.yaml").write_text(ECHO)
    wait_for(lambda: states(fleet).get("say-it-back") == "ready", 20.0, "the new pipeline")

    answer = client.chat.completions.create(
        model="say-it-back", messages=audio_message(spoken(client, "Good morning, everyone."))
    )

    message = answer.choices[0].message
    assert message.audio is not None
    assert "good morning" in heard(client, base64.b64decode(message.audio.data)).lower()
    assert fleet.stack()["processes"]["ingress"]["pid"] == before


def test_a_wrong_file_is_refused_with_its_line_and_disturbs_nobody(fleet: RunningFleet, folder: Path) -> None:
    wrong = folder / "wrong.yaml"
    wrong.write_text(ECHO.replace("say-it-back", "wrong").replace("stage: speak", "stage: shout"))
    wait_for(lambda: states(fleet).get("wrong") == "failed", 20.0, "the refusal")

    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json={"model": "wrong", "messages": []}, timeout=10)
    checked = fleet_check(wrong)
    others = {name: state for name, state in states(fleet).items() if name != "wrong"}
    wrong.unlink()

    assert answer.status_code == 503
    assert "wrong.yaml:9: " in answer.json()["error"]["message"]
    assert "wrong.yaml:9: " in json.dumps(json.loads(_last_refusal(fleet)))
    assert set(others.values()) == {"ready"}
    assert checked.returncode == 1 and checked.stdout.startswith(f"{wrong}:9: ")
    wait_for(lambda: "wrong" not in states(fleet), 20.0, "the file to be forgotten")


def fleet_check(path: Path) -> Any:
    command = [sys.executable, "-m", "fleet_cli", "pipelines", "check", str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def _last_refusal(fleet: RunningFleet) -> str:
    return [line for line in fleet.log("ingress").splitlines() if "pipeline_refused" in line][-1]
