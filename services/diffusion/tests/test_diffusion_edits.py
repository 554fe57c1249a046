"""Edits: what they begin from, what stays, and that company changes nothing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fleet_common.errors import ContractError, InvalidInputError
from fleet_common.stage.port import StepItem
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import PriorityClass
from fleet_contracts.diffusion import EditParams
from fleet_diffusion.core.canvas import Canvas, lay_out, num_steps_from, with_kept
from fleet_diffusion.core.limits import Caps
from fleet_diffusion.core.steps import StepPolicy
from fleet_diffusion.engine.scripted import ScriptedModel
from fleet_diffusion.testing import RecordingSink, picture_item
from fleet_diffusion.worker import DiffusionEngine

CAPS = Caps(max_side=64, max_pixels=64 * 64, max_steps=100, max_pictures=4, max_prompt_chars=100)
RED, BLUE = (np.full((16, 16, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
LEFT = np.arange(16)[None, :].repeat(16, 0) < 8


def edit_item(
    name: str, images: list[np.ndarray], mask: np.ndarray | None = None, *, background: bool = False, **more: object
) -> StepItem:
    params = EditParams(
        **{
            "width": 16,
            "height": 16,
            "num_steps": 10,
            "prompt": name,
            "strength": 0.6,
            "num_images": len(images),
            **more,
        },  # type: ignore[arg-type]
        has_mask=mask is not None,
    )
    tensors = {("pre", f"image{number}"): image for number, image in enumerate(images)}
    if mask is not None:
        tensors["pre", "mask"] = mask.astype(np.uint8)
    item = picture_item(name, params, priority_class=PriorityClass.BACKGROUND if background else PriorityClass.REALTIME)
    return StepItem(task=item.task, attempt=item.attempt, tensors=tensors)  # type: ignore[arg-type]


async def edited(*items: StepItem, slots: int = 4, **engine_args: object) -> list[np.ndarray]:
    engine = DiffusionEngine(
        ScriptedModel(engine_args), WorkerMetrics(), name="p", caps=CAPS, policy=StepPolicy(slots, 4), lanes=8
    )
    await engine.start()
    sinks = [RecordingSink() for _ in items]
    try:
        await asyncio.gather(*(engine.run(item, sink) for item, sink in zip(items, sinks, strict=True)))
    finally:
        await engine.close()
    return [sink.final() for sink in sinks]


def test_several_pictures_lie_side_by_side_in_order() -> None:
    canvas = lay_out([RED, BLUE], None, 0.5)

    np.testing.assert_array_equal(canvas.pixels[:, :8], RED[:, :8])
    np.testing.assert_array_equal(canvas.pixels[:, 8:], BLUE[:, 8:])


def test_a_mask_is_the_first_pictures_and_the_others_stay() -> None:
    canvas = lay_out([RED, BLUE], LEFT, 0.5)

    assert canvas.mask is not None
    assert canvas.mask[:, :4].all()
    assert not canvas.mask[:, 4:].any()


def test_what_the_mask_keeps_is_the_clients_bit_by_bit() -> None:
    made = with_kept(BLUE, Canvas(RED, 1.0, LEFT))

    np.testing.assert_array_equal(made[:, :8], BLUE[:, :8])
    np.testing.assert_array_equal(made[:, 8:], RED[:, 8:])


@pytest.mark.parametrize(("strength", "wanted"), [(1.0, 10), (0.6, 6), (0.55, 5), (0.001, 1)])
def test_strength_is_the_share_of_steps(strength: float, wanted: int) -> None:
    assert num_steps_from(10, strength) == wanted


async def test_edits_in_company_equal_their_lone_runs() -> None:
    items = [edit_item("a", [RED]), edit_item("b", [RED, BLUE], strength=0.9), edit_item("c", [BLUE], LEFT, seed=4)]
    together = await edited(*items)

    for item, made in zip(items, together, strict=True):
        np.testing.assert_array_equal(made, (await edited(item))[0])


async def test_the_order_of_pictures_and_the_pictures_matter() -> None:
    first, second, third = await edited(
        edit_item("a", [RED, BLUE], prompt="x"),
        edit_item("b", [BLUE, RED], prompt="x"),
        edit_item("c", [RED], prompt="x"),
    )

    assert not np.array_equal(first, second)
    assert not np.array_equal(first, third)


async def test_a_model_without_edits_says_so() -> None:
    with pytest.raises(InvalidInputError) as refused:
        await edited(edit_item("a", [RED]), takes_images=False)

    assert refused.value.param == "image"


async def test_pictures_of_another_size_are_a_broken_contract() -> None:
    with pytest.raises(ContractError, match="image1"):
        await edited(edit_item("a", [RED, BLUE[:8]]))
