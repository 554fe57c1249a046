"""The stage's engine: limits, cards, batches and what the steps after it get."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fleet_common.errors import (
    ContextLengthError,
    EngineDeadError,
    FleetError,
    InvalidInputError,
    UnsupportedModalityError,
)
from fleet_common.stage.port import Product, StepItem
from fleet_contracts.base import Modality
from fleet_contracts.preprocess import PreprocessParams, PreprocessResult
from fleet_preprocess.app import build_engine
from fleet_preprocess.core.hashing import content_hash
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.engine.real import CheckpointPromptEngine
from fleet_preprocess.engine.scripted import IMAGE_ID, ScriptedPromptEngine
from fleet_preprocess.settings import PreprocessSettings
from fleet_preprocess.worker import PreprocessEngine

Run = Callable[..., Awaitable[Product | FleetError]]
MakeItem = Callable[[Any, PreprocessParams], StepItem]
POOL = {"pool": "preprocess-cpu", "model": "vlm"}


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def image_part(cases_dir: Path, name: str = "control_rgb.png") -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode((cases_dir / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def started(**engine_args: Any) -> PreprocessEngine:
    made = PreprocessEngine("vlm", ScriptedPromptEngine(engine_args), MediaLimits(max_images=2))
    await made.start()
    return made


async def test_image_request_gives_prompt_pixels_and_facts(cases_dir: Path, run: Run) -> None:
    product = await run(chat([{"type": "text", "text": "colour?"}, image_part(cases_dir)]))

    prompt, pixels = product.tensors["prompt"], product.tensors["pixels0"]
    assert prompt.dtype == np.int32
    assert (prompt == IMAGE_ID).sum() == 1
    assert (pixels.dtype, pixels.shape, pixels.flags.c_contiguous) == (np.uint8, (3, 64, 64), True)
    assert isinstance(product.result, PreprocessResult)
    assert product.result.num_prompt_tokens == prompt.size - 1 + 16
    (media,) = product.media
    assert product.result.media == product.media
    assert (media.kind, media.mode, media.width, media.height, media.num_tokens) == ("image", "RGB", 64, 64, 16)


async def test_user_text_with_image_literals_opens_one_place_only(cases_dir: Path, run: Run) -> None:
    body = json.loads((cases_dir / "req/a05_user_token.json").read_bytes())

    with_image = await run(body)
    body["messages"][0]["content"] = body["messages"][0]["content"][:1]
    without = await run(body)

    assert (with_image.tensors["prompt"] == IMAGE_ID).sum() == 1
    assert (without.tensors["prompt"] == IMAGE_ID).sum() == 0


async def test_user_text_with_image_literals_beside_a_real_model(
    cases_dir: Path, write_checkpoint: Callable[..., Path], make_item: MakeItem
) -> None:
    folder = write_checkpoint()
    prompts = CheckpointPromptEngine(str(folder), {}, "0123456789abcdef")
    engine = PreprocessEngine("vlm", prompts, MediaLimits())
    (card,) = await engine.start()
    body = json.loads((cases_dir / "req/a05_user_token.json").read_bytes())

    (product,) = await engine.run([make_item(body, PreprocessParams(max_new_tokens=16))])

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    image_id = tokenizer.token_to_id("<image>")
    ids = product.tensors["prompt"].tolist()
    assert ids.count(image_id) == 1
    assert tokenizer.decode(ids[: ids.index(image_id)], skip_special_tokens=False) == (
        "<|im_start|>user\nExplain <|image_pad|> and <image> and <|vision_start|>."
    )
    assert product.result.num_prompt_tokens == len(ids) + 15
    assert (card.context_tokens, card.image_tokens) == (512, 16)


async def test_picture_is_never_dropped_silently(cases_dir: Path, run: Run) -> None:
    text = {"type": "text", "text": "colour?"}

    alone = await run(chat([text]))
    for name in ("m10_still.webp", "m12_still.avif", "m09_anim.gif", "m06_cmyk.jpg"):
        with_image = await run(chat([text, image_part(cases_dir, name)]))
        assert with_image.result.num_prompt_tokens == alone.result.num_prompt_tokens + 16


async def test_missing_model_ends_the_worker_with_a_reason(tmp_path: Path) -> None:
    engine = PreprocessEngine("m", CheckpointPromptEngine(str(tmp_path / "none"), {}, "ab"), MediaLimits())

    with pytest.raises(EngineDeadError, match="no model folder"):
        await engine.start()


async def test_large_body_is_taken(cases_dir: Path, run: Run) -> None:
    product = await run((cases_dir / "req/c10_large_image.json").read_bytes())

    assert (product.media[0].source_width, product.media[0].source_height) == (900, 900)


@pytest.mark.parametrize(
    ("num_text_bytes", "max_new_tokens", "fits"),
    [
        (100, 0, True),
        (100, 10, True),
        (101, 10, False),
        (109, 0, True),
        (110, 0, False),
        (109, 1, True),
        (500, 1, False),
    ],
)
async def test_prompt_and_output_must_fit_the_context(
    num_text_bytes: int, max_new_tokens: int, fits: bool, make_item: MakeItem
) -> None:
    engine = await started(context_tokens=110)
    body = {"prompt": "x" * num_text_bytes}

    (result,) = await engine.run([make_item(body, PreprocessParams(route="completion", max_new_tokens=max_new_tokens))])

    assert isinstance(result, Product if fits else ContextLengthError)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a" * 5_000_000}],
        [{"role": "user", "content": [{"type": "text", "text": "a" * 5_000_000}]}],
        [{"role": "user", "content": ""}] * 100_000,
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}],
        [{"role": "assistant", "tool_calls": [{"a": ["b" * 2_500_000, {"c" * 2_500_000: 1}]}]}],
    ],
)
async def test_text_that_cannot_fit_is_never_rendered(
    run: Run, monkeypatch: pytest.MonkeyPatch, messages: list[Any]
) -> None:
    monkeypatch.setattr(ScriptedPromptEngine, "chat_ids", None)

    refused = await run({"model": "vlm", "messages": messages})

    assert isinstance(refused, ContextLengthError)
    assert (refused.param, refused.code) == ("messages", "context_length_exceeded")
    assert "context is 8192 tokens" in str(refused)


async def test_completion_that_cannot_fit_is_never_tokenized(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedPromptEngine, "completion_ids", None)

    refused = await run({"model": "vlm", "prompt": "a" * 5_000_000}, route="completion")

    assert isinstance(refused, ContextLengthError)
    assert refused.param == "prompt"


async def test_images_count_in_the_context(cases_dir: Path, make_item: MakeItem) -> None:
    engine = await started(context_tokens=200, image_tokens=100)
    parts = [image_part(cases_dir), image_part(cases_dir, "m16_truncated.jpg")]

    (result,) = await engine.run([make_item(chat(parts), PreprocessParams(max_new_tokens=5))])

    # Refused by the counts alone, before the damaged file is looked at.
    assert isinstance(result, ContextLengthError)
    assert "200 tokens" in str(result)
    assert "(200 of them from media)" in str(result)
    assert "5 tokens of output" in str(result)


async def test_too_many_images_are_refused_with_both_counts(cases_dir: Path, make_item: MakeItem) -> None:
    engine = await started()

    (result,) = await engine.run([make_item(chat([image_part(cases_dir)] * 3), PreprocessParams())])

    assert isinstance(result, ContextLengthError)
    assert "at most 2 images" in str(result)
    assert "3 were sent" in str(result)


async def test_text_model_takes_no_images(cases_dir: Path, make_item: MakeItem) -> None:
    engine = await started(image_tokens=0)

    (result,) = await engine.run([make_item(chat([image_part(cases_dir)]), PreprocessParams())])

    assert isinstance(result, UnsupportedModalityError)
    assert result.param == "messages[0].content[0].image_url"


async def test_one_bad_request_does_not_touch_its_neighbours(cases_dir: Path, make_item: MakeItem) -> None:
    engine = await started()
    good, bad = chat([image_part(cases_dir)]), chat([image_part(cases_dir, "m16_truncated.jpg")])

    results = await engine.run([make_item(body, PreprocessParams()) for body in (good, bad, b"{", good)])

    kinds = [type(result) for result in results]
    assert kinds == [Product, InvalidInputError, InvalidInputError, Product]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("ab", [97, 98]), (["ab"], [97, 98]), ([97, 98], [97, 98]), ([97, IMAGE_ID], None), ([-1], None), ([300], None)],
)
async def test_completion_prompts(run: Run, prompt: Any, ids: list[int] | None) -> None:
    result = await run({"prompt": prompt}, route="completion")

    if ids is None:
        assert isinstance(result, InvalidInputError)
        assert result.param == "prompt"
    else:
        assert result.tensors["prompt"].tolist() == ids
        assert result.result.num_prompt_tokens == 2


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [97, "a"]])
async def test_prompts_that_are_none_are_refused(run: Run, prompt: Any) -> None:
    assert isinstance(await run({"prompt": prompt}, route="completion"), InvalidInputError)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "input_audio", "input_audio": {}}], "messages[0].content[0].input_audio"),
        ([{"type": "video_url"}], "messages[0].content[0].video_url"),
        ([{"type": "image_url"}], "messages[0].content[0].image_url"),
        ([{"type": "text"}], "messages[0].content[0].text"),
    ],
)
async def test_part_nobody_reads_is_named(run: Run, content: Any, param: str) -> None:
    result = await run(chat(content))

    assert isinstance(result, InvalidInputError | UnsupportedModalityError)
    assert result.param == param


async def test_card_says_what_the_model_takes() -> None:
    made = PreprocessEngine("vlm", ScriptedPromptEngine({}), MediaLimits(), context_tokens=77)

    (card,) = await made.start()

    assert card.input_modalities == (Modality.TEXT, Modality.IMAGE, Modality.VIDEO)
    assert (card.context_tokens, card.image_tokens, card.max_images, card.revision) == (77, 16, 8, "scripted-1")


def test_content_hash_tells_shapes_settings_and_revisions_apart() -> None:
    flat = np.arange(48, dtype=np.uint8)
    wide, tall = flat.reshape(2, 8, 3), flat.reshape(8, 2, 3)

    hashes = {
        content_hash(wide, settings={"a": 1}, revision="r"),
        content_hash(tall, settings={"a": 1}, revision="r"),
        content_hash(wide, settings={"a": 2}, revision="r"),
        content_hash(wide, settings={"a": 1}, revision="s"),
    }

    assert len(hashes) == 4
    assert {len(digest) for digest in hashes} == {64}


def test_content_hashes_of_many_images_do_not_collide() -> None:
    """Case C18."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (20_000, 8, 8, 3), dtype=np.uint8)

    hashes = {content_hash(image, settings={}, revision="r") for image in images}

    assert len(hashes) == 20_000


def test_engine_is_chosen_by_the_settings() -> None:
    settings = PreprocessSettings(engine="scripted", allowed_media_hosts=("cdn.example",), **POOL)

    assert isinstance(build_engine(settings), PreprocessEngine)
    with pytest.raises(ValueError, match="unknown engine"):
        build_engine(PreprocessSettings(engine="other", **POOL))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PREPROCESS_ALLOWED_MEDIA_HOSTS", '["cdn.example:8443"]')
    monkeypatch.setenv("FLEET_PREPROCESS_MAX_IMAGE_PIXELS", "1000")

    settings = PreprocessSettings(**POOL)

    assert settings.allowed_media_hosts == ("cdn.example:8443",)
    assert settings.max_image_pixels == 1000
