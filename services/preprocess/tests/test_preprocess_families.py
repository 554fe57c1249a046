"""Pictures of every family: sizes, tokens, budgets."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fleet_common.errors import ContextLengthError
from fleet_common.stage.port import Product, StepItem
from fleet_contracts.preprocess import PreprocessParams
from fleet_preprocess.core.budget import PixelBudgets
from fleet_preprocess.core.families import FAMILIES, ImageFamily, ModelFiles, image_family
from fleet_preprocess.core.internvl import InternVlTiles
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.core.qwen_vl import QwenResolution
from fleet_preprocess.engine.port import ModelFacts
from fleet_preprocess.engine.scripted import IMAGE_ID, ScriptedPromptEngine
from fleet_preprocess.worker import PreprocessEngine

MakeItem = Callable[[Any, PreprocessParams], StepItem]
QWEN = QwenResolution(min_pixels=4 * 28 * 28, max_pixels=256 * 28 * 28)
INTERN = InternVlTiles(side_px=32, patch_px=8, tokens_per_tile=4, max_tiles=6)


class FamilyPrompts(ScriptedPromptEngine):
    """The scripted engine with another family's pictures."""

    def __init__(self, family: ImageFamily, context_tokens: int = 8192) -> None:
        super().__init__({})
        self._family_of_test = family
        self._context = context_tokens

    def load(self) -> ModelFacts:
        return ModelFacts("r", self._context, 259, image_token_id=IMAGE_ID, images=self._family_of_test)


def picture(width: int, height: int, **image_url: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    noise = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url, **image_url}}


async def prepare(
    make_item: MakeItem, family: ImageFamily, *parts: dict[str, Any], max_pixels: int = 0, **engine: Any
) -> Any:
    context_tokens = engine.pop("context_tokens", 8192)
    preprocess = PreprocessEngine("vlm", FamilyPrompts(family, context_tokens), MediaLimits(), **engine)
    await preprocess.start()
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    (made,) = await preprocess.run([make_item(body, PreprocessParams(max_pixels=max_pixels))])
    await preprocess.close()
    return made


@given(width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_sides_are_whole_tokens_within_the_models_bounds(width: int, height: int) -> None:
    made = QWEN.target_size(height, width)

    assert made[0] % 28 == made[1] % 28 == 0 < min(made)
    if max(width, height) < 20 * min(width, height):
        assert QWEN.min_pixels <= made[0] * made[1] <= QWEN.max_pixels


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (1000, 300), (333, 777), (2000, 2000)])
def test_half_the_budget_is_half_the_tokens_within_a_row(size: tuple[int, int]) -> None:
    rgb = np.zeros((*size, 3), np.uint8)

    whole = QWEN.prepare(rgb, 0)
    budget = whole.pixels.shape[0] * whole.pixels.shape[1]
    half = QWEN.prepare(rgb, budget // 2)

    row = max(whole.grid[1], whole.grid[2]) // 2
    assert half.num_tokens <= whole.num_tokens / 2
    assert abs(half.num_tokens - whole.num_tokens / 2) <= row
    assert half.pixels.shape[0] * half.pixels.shape[1] <= budget // 2


@pytest.mark.parametrize("size", [(41, 26), (300, 25), (5, 1000), (1, 1)])
def test_thin_and_tiny_pictures_are_scaled_up(size: tuple[int, int]) -> None:
    made = QWEN.prepare(np.zeros((*size, 3), np.uint8), 0)

    assert made.num_tokens == made.grid[1] * made.grid[2] // 4 >= 4


async def test_usage_and_grid_follow_the_size_of_a_picture(make_item: MakeItem) -> None:
    one, two, three = picture(280, 140), picture(56, 84), picture(140, 280)

    made = await prepare(make_item, QWEN, one, {"type": "text", "text": "x"}, two, three)

    assert isinstance(made, Product)
    assert [item.grid for item in made.result.media] == [(1, 10, 20), (1, 6, 4), (1, 20, 10)]
    assert [item.num_tokens for item in made.result.media] == [50, 6, 50]
    assert [made.tensors[f"pixels{i}"].shape for i in range(3)] == [(3, 140, 280), (3, 84, 56), (3, 280, 140)]
    assert made.result.num_prompt_tokens == made.tensors["prompt"].size - 3 + 106


@pytest.mark.parametrize(
    ("image_url", "max_pixels", "budgets", "expected"),
    [
        ({}, 0, PixelBudgets(), 0),
        ({}, 20_000, PixelBudgets(), 20_000),
        ({"max_pixels": 10_000}, 20_000, PixelBudgets(), 10_000),
        ({}, 20_000, PixelBudgets(max_pixels=9_000), 9_000),
        ({"detail": "low"}, 0, PixelBudgets(low_detail_pixels=8_000), 8_000),
        ({"detail": "high"}, 0, PixelBudgets(low_detail_pixels=8_000), 0),
        ({"detail": "auto"}, 0, PixelBudgets(low_detail_pixels=8_000), 0),
    ],
)
async def test_the_strictest_budget_holds_and_is_part_of_the_content_hash(
    make_item: MakeItem, image_url: dict[str, Any], max_pixels: int, budgets: PixelBudgets, expected: int
) -> None:
    free = await prepare(make_item, QWEN, picture(300, 200))

    made = await prepare(make_item, QWEN, picture(300, 200, **image_url), max_pixels=max_pixels, budgets=budgets)

    (item,) = made.result.media
    assert item.max_pixels == expected
    assert (item.num_tokens < free.result.media[0].num_tokens) == (expected > 0)
    assert (made.hashes != free.hashes) == (expected > 0)
    assert not expected or item.width * item.height <= expected


async def test_pictures_too_large_for_the_context_are_refused_with_both_counts(make_item: MakeItem) -> None:
    made = await prepare(make_item, QWEN, picture(280, 280), picture(280, 280), context_tokens=150)

    assert isinstance(made, ContextLengthError)
    assert "150 tokens" in str(made)
    assert "(200 of them from media)" in str(made)


async def test_tiles_travel_together_and_their_frame_counts(make_item: MakeItem) -> None:
    made = await prepare(make_item, INTERN, picture(96, 64), picture(30, 30))

    assert [made.tensors[f"pixels{i}"].shape for i in range(2)] == [(7, 3, 32, 32), (1, 3, 32, 32)]
    assert [(item.num_tokens, item.grid) for item in made.result.media] == [(28, (7, 4, 4)), (4, (1, 4, 4))]
    assert (made.result.media[0].width, made.result.media[0].height) == (32, 7 * 32)
    assert made.result.num_prompt_tokens == made.tensors["prompt"].size - 2 + 32 + 2 * 2


@pytest.mark.parametrize(("budget_tiles", "expected"), [(100, 7), (7, 7), (6, 5), (3, 3), (2, 1), (1, 1)])
def test_a_budget_bounds_the_tiles(budget_tiles: int, expected: int) -> None:
    made = INTERN.prepare(np.zeros((64, 96, 3), np.uint8), budget_tiles * 32 * 32)

    assert len(made.pixels) == expected


def test_every_family_reads_the_files_of_its_models(tmp_path: Path) -> None:
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    size = {"height": 28, "width": 28}
    for model_type in FAMILIES:
        processor = {"size": size} if model_type in ("llava", "internvl") else {"min_pixels": 1, "max_pixels": 99}
        more = {"image_processor_type": "SiglipImageProcessor"} if model_type == "llava" else {}
        family = image_family(ModelFiles({"model_type": model_type, "vision_config": vision}, {**processor, **more}))
        assert family.prepare(np.zeros((30, 20, 3), np.uint8), 0).num_tokens >= family.min_tokens > 0


@pytest.mark.parametrize(
    ("model_type", "vision", "processor", "named"),
    [
        ("idefics3", {}, {}, "idefics3"),
        ("qwen2_vl", {"patch_size": 16}, {}, "patch"),
        ("qwen2_vl", {}, {"do_resize": False}, "resize"),
        ("internvl", {"image_size": [32, 32], "patch_size": 8}, {"size": {"height": 48, "width": 48}}, "48"),
        ("internvl", {"image_size": [32, 64], "patch_size": 8}, {}, "square"),
    ],
)
def test_what_no_adapter_follows_is_refused_at_start(
    model_type: str, vision: dict[str, Any], processor: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        image_family(ModelFiles({"model_type": model_type, "vision_config": vision}, processor))
