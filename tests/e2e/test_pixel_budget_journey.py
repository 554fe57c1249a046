"""A model whose pictures keep their size (a tiny random Qwen2.5-VL), over HTTP: what a pixel budget saves."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from fleet_cli.testing import RunningFleet, running_fleet
from tests.support.pipeline import chat_of, png_url
from tests.support.tiny_models import write_qwen2_5_vl

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = write_qwen2_5_vl(tmp_path_factory.mktemp("models") / "tiny-qwen")
    with running_fleet(tmp_path_factory.mktemp("fleet"), {"FLEET_CHAT_MODEL": str(folder)}) as running:
        yield running


@pytest.fixture
def client(fleet: RunningFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)


def picture(width: int, height: int) -> Image.Image:
    blocks = np.random.default_rng(width).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def prompt_tokens(client: openai.OpenAI, body: dict[str, object], **extra: object) -> int:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        **{**body, "model": model}, max_tokens=2, temperature=0, extra_body=dict(extra)
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens


def test_half_the_pixels_are_half_the_tokens_of_a_picture(client: openai.OpenAI) -> None:
    """8 x 6 tokens of 28 pixels."""
    body, text = chat_of([picture(224, 168), "?"]), chat_of(["?"])
    around = prompt_tokens(client, text) + 2  # the marks around a picture

    whole = prompt_tokens(client, body) - around
    half = prompt_tokens(client, body, max_pixels=224 * 168 // 2) - around
    part = {"url": png_url(picture(224, 168)), "max_pixels": 224 * 168 // 2}
    by_part = prompt_tokens(client, chat_of([{"type": "image_url", "image_url": part}, "?"])) - around

    assert whole == 48
    assert 24 - 8 <= half <= 24
    assert by_part == half


def test_pictures_of_all_sizes_have_their_tokens_in_the_order_of_their_parts(
    client: openai.OpenAI, fleet: RunningFleet
) -> None:
    sizes = [(56, 112), (112, 112), (168, 56)]
    parts = [part for size in sizes for part in (picture(*size), "and")]
    model = client.models.list().data[0].id

    answer = client.chat.completions.with_raw_response.create(**{**chat_of(parts), "model": model}, max_tokens=2)
    request_id = answer.headers["x-fleet-request-id"]
    timeline = httpx.get(f"{fleet.url}/v1/requests/{request_id}").json()

    media = timeline["media"]
    assert [(item["width"], item["height"]) for item in media] == sizes
    assert [item["num_tokens"] for item in media] == [8, 16, 12]


@pytest.mark.parametrize("size", [(26, 41), (25, 300), (1000, 5)])
def test_thin_and_tiny_pictures_are_answered(client: openai.OpenAI, size: tuple[int, int]) -> None:
    assert prompt_tokens(client, chat_of([picture(*size), "?"])) > prompt_tokens(client, chat_of(["?"])) + 2


def test_a_budget_that_is_none_is_named(client: openai.OpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": png_url(picture(56, 56)), "max_pixels": 0}}

    with pytest.raises(openai.BadRequestError) as refused:
        prompt_tokens(client, chat_of([part]))

    assert "max_pixels" in str(refused.value)
