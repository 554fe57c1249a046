"""Videos in a chat, from the real models over HTTP: what is seen of them, in which order, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from fleet_cli.testing import RunningFleet
from tests.support.audio_files import encoded, tone
from tests.support.pipeline import chat_of, video_url
from tests.support.scenes import Scene, random_scene, render
from tests.support.video_files import Rgb, video_file

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
PARAM = "messages[0].content[0].video_url"
FRAMES_HZ = 2


def ask(fleet: RunningFleet, *parts: Any, **fields: Any) -> httpx.Response:
    body = {**chat_of(parts), "model": MODEL, "temperature": 0, "max_tokens": 24, **fields}
    return httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=120)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def media_of(fleet: RunningFleet, answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    report = httpx.get(f"{fleet.url}/v1/requests/{answer.headers['x-fleet-request-id']}", timeout=10).json()
    return list(report["media"])


def drawn(seed: int) -> tuple[Scene, Image.Image]:
    scene = random_scene(random.Random(seed))
    return scene, render(scene).resize((256, 256), Image.Resampling.NEAREST)


def lossless(*pictures: Image.Image) -> bytes:
    """A video of these pictures, half a second each, whose frames are theirs to the last bit."""
    frames: list[Rgb] = [np.asarray(picture.convert("RGB")) for picture in pictures]
    return video_file(frames, FRAMES_HZ, "avi", "rawvideo", "bgr24")


def test_a_video_of_one_frame_is_answered_as_the_picture_is(real_fleet: RunningFleet) -> None:
    scene, picture = drawn(21)

    of_video = ask(real_fleet, video_url(lossless(picture)), "Describe the picture.")
    of_picture = ask(real_fleet, picture, "Describe the picture.")

    assert said(of_video) == said(of_picture)
    assert scene.is_named_in(said(of_video))
    assert of_video.json()["usage"] == of_picture.json()["usage"]


def test_frames_stand_side_by_side_in_their_order(real_fleet: RunningFleet) -> None:
    first, second = drawn(22)[1], drawn(23)[1]

    of_video = ask(real_fleet, video_url(lossless(first, second)), "Describe the picture.")
    of_pictures = ask(real_fleet, first, second, "Describe the picture.")
    backwards = ask(real_fleet, video_url(lossless(second, first)), "Describe the picture.")

    assert said(of_video) == said(of_pictures)
    assert of_video.json()["usage"]["prompt_tokens"] == of_pictures.json()["usage"]["prompt_tokens"]
    (video,) = media_of(real_fleet, of_video)
    assert (video["kind"], video["grid"][0], video["duration_s"]) == ("video", 2, 1.0)
    assert video["num_tokens"] == sum(media["num_tokens"] for media in media_of(real_fleet, of_pictures))
    assert video["sha256"] != media_of(real_fleet, backwards)[0]["sha256"]


def test_the_official_client_streams_what_a_compressed_video_shows(client: openai.OpenAI) -> None:
    scene, picture = drawn(24)
    data = video_file([np.asarray(picture.convert("RGB"))] * 5, rate_hz=25)
    parts: Any = [{"type": "text", "text": "Describe the picture."}, video_url(data)]

    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=24, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    assert scene.is_named_in(text), text


def test_m29_a_header_that_claims_a_frame_too_many_is_no_500(real_fleet: RunningFleet, case_files: Path) -> None:
    answer = ask(real_fleet, video_url((case_files / "m29_claims32_has31.avi").read_bytes()), "What happens?")

    (video,) = media_of(real_fleet, answer)
    assert video["grid"][0] * video["num_tokens"] > 0
    assert 3.0 < video["duration_s"] <= 3.2


def test_models_say_whether_they_take_videos(real_fleet: RunningFleet) -> None:
    takes = {
        model["id"]: model["input_modalities"] for model in httpx.get(f"{real_fleet.url}/v1/models").json()["data"]
    }

    assert "video" in takes[MODEL]
    assert [model for model in takes if "video" in takes[model] and "image" not in takes[model]] == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"I am a text.\n" * 100, "invalid_video"),
        (encoded(tone(1.0), "mp3", "libmp3lame"), "no_video_stream"),
        (video_file([np.zeros((32, 32, 3), np.uint8)] * 130, 1, "avi", "rawvideo", "bgr24"), "video_too_long"),
    ],
    ids=["text", "sound", "too long"],
)
def test_what_cannot_be_seen_is_a_400_that_names_the_part(real_fleet: RunningFleet, data: bytes, code: str) -> None:
    answer = ask(real_fleet, video_url(data), "What happens?")

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, PARAM)
