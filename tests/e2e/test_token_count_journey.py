"""`/v1/tokenize` says what the generating routes then report as usage."""

from __future__ import annotations

import random
from typing import Any

import httpx
import openai
import pytest

from fleet_cli.testing import RunningFleet
from tests.support.scenes import data_url, picture_message, random_scene, render

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
TOOL = {"type": "function", "function": {"name": "get_time", "description": "The time of day."}}
PICTURE = picture_message(data_url(render(random_scene(random.Random(1)))))


def count(fleet: RunningFleet, **fields: Any) -> httpx.Response:
    return httpx.post(f"{fleet.url}/v1/tokenize", json={"model": MODEL, **fields}, timeout=60)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        {"messages": [{"role": "user", "content": "What time is it?"}], "tools": [TOOL]},
        {"messages": [PICTURE]},
    ],
    ids=["text", "tools", "picture"],
)
def test_a_chat_has_as_many_tokens_as_counted(
    real_fleet: RunningFleet, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    counted = count(real_fleet, **fields).json()
    answer = client.chat.completions.create(model=MODEL, max_tokens=1, **fields)

    assert answer.usage is not None
    assert counted == {"object": "token_count", "model": MODEL, "count": answer.usage.prompt_tokens}


def test_a_prompt_has_as_many_tokens_as_counted(real_fleet: RunningFleet, client: openai.OpenAI) -> None:
    counted = count(real_fleet, prompt="The capital of France is").json()
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=1)

    assert answer.usage is not None
    assert counted["count"] == answer.usage.prompt_tokens


def test_a_count_over_the_context_is_refused(real_fleet: RunningFleet) -> None:
    answer = count(real_fleet, prompt="word " * 9000)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
