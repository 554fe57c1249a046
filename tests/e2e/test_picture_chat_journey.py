"""Pictures in, text out, through every service, from the real models."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import openai
import pytest

from fleet_cli.testing import RunningFleet
from tests.support.scenes import data_url, picture_message, random_scene, render
from tests.support.skills import SKILLS, ask

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
NUM_TASKS = 30
UNLUCKY = 2
HIDDEN_SIZE = 576
FLOAT32_BYTES = 4


def describe(client: openai.OpenAI, url: str, **fields: object) -> openai.types.chat.ChatCompletion:
    """One greedy description."""
    body = {"model": MODEL, "messages": [picture_message(url)], "temperature": 0, "max_tokens": 24, **fields}
    return client.chat.completions.create(**body)


def timeline(fleet: RunningFleet, answer: openai.types.chat.ChatCompletion) -> dict:
    """`/v1/requests/{id}` of an answer."""
    response = httpx.get(f"{fleet.url}/v1/requests/{answer.id}", timeout=10)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("skill", SKILLS)
def test_fresh_scenes_of_another_renderer_are_understood(real_fleet: RunningFleet, skill: str) -> None:
    outcomes = ask(real_fleet.url, skill, NUM_TASKS)

    wrong = [(o.task.text, o.answer, o.task.scene) for o in outcomes if not o.is_right]
    print(f"{skill}: {NUM_TASKS - len(wrong)} of {NUM_TASKS} right")
    # A run of few tasks may be a little unlucky; `make bench-pictures` asks a hundred each.
    assert len(wrong) <= NUM_TASKS * (100 - SKILLS[skill][1]) // 100 + UNLUCKY, wrong


def test_a_timeline_shows_each_step_and_what_the_encoder_got(client: openai.OpenAI, real_fleet: RunningFleet) -> None:
    scene = random_scene(random.Random(3))

    answer = describe(client, data_url(render(scene)))

    report = timeline(real_fleet, answer)
    assert [step["stage"] for step in report["steps"]] == ["preprocess", "vision_encode", "decode"]
    for step in report["steps"]:
        assert step["queued_unix_s"] <= step["started_unix_s"] <= step["finished_unix_s"]
        assert step["worker"] and step["pool"] and step["delivery"] == 1
    (media,) = report["media"]
    assert media["kind"] == "image" and media["mode"] == "RGB" and len(media["sha256"]) == 64
    vision = report["steps"][1]
    assert vision["bytes_out"] == media["num_tokens"] * HIDDEN_SIZE * FLOAT32_BYTES


def test_the_same_picture_twice_is_encoded_once(client: openai.OpenAI, real_fleet: RunningFleet) -> None:
    url = data_url(render(random_scene(random.Random())))

    hits = [timeline(real_fleet, describe(client, url))["media"][0]["cache_hit"] for _ in range(6)]

    assert hits[0] is False
    assert any(hits[1:])


def test_two_pictures_are_seen_in_the_order_of_their_parts(client: openai.OpenAI, real_fleet: RunningFleet) -> None:
    urls = [data_url(render(random_scene(random.Random(seed)))) for seed in (11, 12)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [parts[0], {"type": "text", "text": "Describe the picture."}, parts[1]]}

    answer = client.chat.completions.create(model=MODEL, messages=[message], temperature=0, max_tokens=8)

    alone = [timeline(real_fleet, describe(client, url))["media"][0]["sha256"] for url in urls]
    assert [media["sha256"] for media in timeline(real_fleet, answer)["media"]] == alone


def test_a_timeline_is_nobody_elses(real_fleet: RunningFleet) -> None:
    response = httpx.get(f"{real_fleet.url}/v1/requests/chatcmpl-00000000_{'0' * 32}", timeout=10)

    assert response.status_code == 404
    assert response.json()["error"]["type"] in {"invalid_request_error", "not_found_error"}


def test_hostile_and_broken_pictures_are_refused_with_the_part_at_fault(
    client: openai.OpenAI, case_files: Path
) -> None:
    import base64

    broken = base64.b64encode((case_files / "m16_truncated.jpg").read_bytes()).decode()
    urls = {
        "invalid_image": f"data:image/jpeg;base64,{broken}",
        "url_not_allowed": "http://127.0.0.1:8222/varz",
    }

    for code, url in urls.items():
        with pytest.raises(openai.BadRequestError) as refused:
            describe(client, url, stream=True)
        assert refused.value.code == code
        assert refused.value.param == "messages[0].content[1].image_url"
