"""A chat model that hears (a tiny random Qwen2-Audio), over HTTP: what it is sent, what it costs, what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from fleet_cli.testing import RunningFleet, running_fleet
from tests.support.audio_files import encoded, silent_video, tone, wav
from tests.support.pipeline import chat_of, input_audio
from tests.support.tiny_models import write_qwen2_audio

pytestmark = pytest.mark.e2e
PARAM = "messages[0].content[0].input_audio"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = write_qwen2_audio(tmp_path_factory.mktemp("models") / "tiny-listener")
    with running_fleet(tmp_path_factory.mktemp("fleet"), {"FLEET_CHAT_MODEL": str(folder)}) as running:
        yield running


def post(fleet: RunningFleet, *parts: Any, route: str = "chat/completions", **more: Any) -> httpx.Response:
    body = {**chat_of(parts), "model": "tiny-listener", **more}
    return httpx.post(f"{fleet.url}/v1/{route}", json=body, timeout=120)


def chat(fleet: RunningFleet, *parts: Any) -> httpx.Response:
    return post(fleet, *parts, max_tokens=4, temperature=0, ignore_eos=True)


def media_of(fleet: RunningFleet, answer: httpx.Response) -> list[dict[str, Any]]:
    report = httpx.get(f"{fleet.url}/v1/requests/{answer.headers['x-fleet-request-id']}", timeout=10).json()
    return list(report["media"])


def test_the_official_client_sends_what_was_said(fleet: RunningFleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)
    data = base64.b64encode(encoded(tone(2.0), "mp3", "libmp3lame")).decode()
    parts: Any = [
        {"type": "text", "text": "What was that?"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}},
    ]

    stream = client.chat.completions.create(
        model="tiny-listener",
        messages=[{"role": "user", "content": parts}],
        max_tokens=4,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage for chunk in stream if chunk.usage is not None]

    assert len(usage) == 1
    assert usage[0].completion_tokens >= 1
    listed = httpx.get(f"{fleet.url}/v1/models/tiny-listener", timeout=10).json()
    assert (listed["input_modalities"], listed["max_audios"]) == (["text", "audio"], 8)


def test_m23_stereo_of_48_khz_is_one_second_to_a_chat_model_too(fleet: RunningFleet) -> None:
    left = tone(1.0, 48_000)
    data = wav(np.stack([left, np.zeros_like(left)], axis=1).reshape(-1), 48_000, channels=2)

    answer = chat(fleet, input_audio(data))

    assert answer.status_code == 200, answer.text
    (medium,) = media_of(fleet, answer)
    assert abs(medium["duration_s"] * 16_000 - 16_000) <= 1
    assert (medium["sample_rate_hz"], medium["num_channels"], medium["num_tokens"]) == (48_000, 2, 25)


def test_recordings_are_counted_and_reported_in_their_order(fleet: RunningFleet) -> None:
    first, second = input_audio(wav(tone(1.0))), input_audio(wav(tone(3.0, hertz=900.0)))

    answer = chat(fleet, first, "or", second, "?")
    turned = chat(fleet, second, "or", first, "?")
    text = chat(fleet, "or", "?")
    counted = post(fleet, first, "or", second, "?", route="tokenize")

    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    around = 2 * 2  # <|audio_bos|> and <|audio_eos|>
    assert prompt_tokens == text.json()["usage"]["prompt_tokens"] + around + 25 + 75
    assert counted.json()["count"] == prompt_tokens
    media = media_of(fleet, answer)
    assert [(one["kind"], one["part"], one["num_tokens"]) for one in media] == [
        ("audio", PARAM, 25),
        ("audio", "messages[0].content[2].input_audio", 75),
    ]
    assert answer.json()["choices"] != turned.json()["choices"]
    assert [one["cache_hit"] for one in media_of(fleet, turned)] == [True, True]


@pytest.mark.parametrize(
    ("part", "code", "param"),
    [
        (input_audio(silent_video()), "no_audio_stream", PARAM),
        (input_audio(wav(tone(31.0))), "audio_too_long", PARAM),
        (input_audio(wav(np.zeros(0, np.float32))), "audio_too_short", PARAM),
        (input_audio(b"I am a text.\n" * 100), "invalid_audio", PARAM),
        (input_audio(b""), "invalid_audio", f"{PARAM}.data"),
        ({"type": "input_audio", "input_audio": {"data": "!!", "format": "wav"}}, "invalid_audio", f"{PARAM}.data"),
        (input_audio(wav(tone(1.0)), "ogg"), None, f"{PARAM}.format"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "unsupported_modality",
            "messages[0].content[0].image_url",
        ),
    ],
    ids=["m27 no sound", "too long", "m21 no samples", "text", "m21 no bytes", "base64", "format", "a picture"],
)
def test_what_cannot_be_heard_is_a_400_that_names_the_part(
    fleet: RunningFleet, part: dict[str, Any], code: str | None, param: str
) -> None:
    answer = chat(fleet, part)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert code is None or error["code"] == code
