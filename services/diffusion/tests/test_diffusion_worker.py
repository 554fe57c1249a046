"""The stage's engine over a scripted model: each picture as if it were alone, whatever happens around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from fleet_common.errors import CancelledWorkError, EngineDeadError, EngineError, InvalidInputError
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import Modality, PriorityClass
from fleet_contracts.diffusion import DiffusionParams
from fleet_diffusion import worker
from fleet_diffusion.core.limits import Caps
from fleet_diffusion.core.steps import StepPolicy
from fleet_diffusion.engine.port import PictureInWork
from fleet_diffusion.engine.scripted import ScriptedModel
from fleet_diffusion.testing import RecordingSink, picture_item
from fleet_diffusion.worker import DiffusionEngine

CAPS = Caps(max_side=128, max_pixels=128 * 128, max_steps=200, max_pictures=4, max_prompt_chars=1000)


class WatchedModel(ScriptedModel):
    """Remembers every pass, and calls `between` after each, in the model's thread."""

    def __init__(self, **engine_args: object) -> None:
        super().__init__(engine_args)
        self.passes: list[tuple[str, ...]] = []
        self.between: Callable[[], None] = lambda: None

    def step(self, pictures: list[PictureInWork]) -> None:  # type: ignore[override]
        super().step(pictures)
        self.passes.append(tuple(picture.request.prompt for picture in pictures))  # type: ignore[attr-defined]
        self.between()


@asynccontextmanager
async def opened(
    model: ScriptedModel, *, slots: int = 4, max_batch: int = 4, metrics: WorkerMetrics | None = None
) -> AsyncIterator[DiffusionEngine]:
    engine = DiffusionEngine(
        model, metrics or WorkerMetrics(), name="painter", caps=CAPS, policy=StepPolicy(slots, max_batch), lanes=16
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def params(prompt: str, **more: object) -> DiffusionParams:
    return DiffusionParams(**{"width": 64, "height": 64, "num_steps": 6, "prompt": prompt, **more})  # type: ignore[arg-type]


async def alone(wanted: DiffusionParams) -> np.ndarray:
    sink = RecordingSink()
    async with opened(ScriptedModel({})) as engine:
        await engine.run(picture_item("alone", wanted), sink)
    return sink.final()


async def test_the_card_says_text_in_pictures_out_and_the_limits() -> None:
    engine = DiffusionEngine(
        ScriptedModel({}), WorkerMetrics(), name="painter", caps=CAPS, policy=StepPolicy(4, 4), lanes=16
    )
    (card,) = await engine.start()
    await engine.close()

    assert (card.input_modalities, card.max_images) == ((Modality.TEXT, Modality.IMAGE), 4)
    assert card.output_modalities == (Modality.IMAGE,)
    assert card.pictures is not None
    assert (card.pictures.max_side, card.pictures.size_step) == (128, 8)


async def test_pictures_made_together_equal_their_lone_runs() -> None:
    wanted = [params(f"p{i}", num_steps=4 + i, seed=i) for i in range(4)]
    sinks = [RecordingSink() for _ in wanted]
    model = WatchedModel()
    async with opened(model) as engine:
        await asyncio.gather(*(engine.run(picture_item(str(i), one), sinks[i]) for i, one in enumerate(wanted)))

    assert max(len(together) for together in model.passes) == 4
    for one, sink in zip(wanted, sinks, strict=True):
        np.testing.assert_array_equal(sink.final(), await alone(one))


async def test_each_picture_of_a_request_has_a_seed_of_its_own() -> None:
    sink = RecordingSink()
    async with opened(ScriptedModel({})) as engine:
        usage = await engine.run(picture_item("n", params("a red star", n=3, seed=7)), sink)

    assert usage.prompt_tokens == 3
    np.testing.assert_array_equal(sink.final(2), await alone(params("a red star", seed=9)))


async def test_partial_pictures_come_before_the_final_one() -> None:
    sink = RecordingSink()
    async with opened(ScriptedModel({})) as engine:
        await engine.run(picture_item("p", params("x", num_partial=2, format="jpeg")), sink)

    assert [(kept.index, kept.is_final) for kept in sink.pictures] == [(0, False), (1, False), (2, True)]
    assert {kept.media_type for kept in sink.pictures} == {"image/jpeg"}


async def test_a_cancelled_request_takes_no_further_step() -> None:
    sink, other = RecordingSink(), RecordingSink()
    model = WatchedModel()

    def cancel_after_three() -> None:
        sink.cancelled = sum("gone" in together for together in model.passes) >= 3

    model.between = cancel_after_three
    async with opened(model) as engine:
        runs = [
            engine.run(picture_item("1", params("gone", num_steps=50)), sink),
            engine.run(picture_item("2", params("stays", num_steps=8)), other),
        ]
        outcomes = await asyncio.gather(*runs, return_exceptions=True)

    assert isinstance(outcomes[0], CancelledWorkError)
    assert sum("gone" in together for together in model.passes) == 3
    np.testing.assert_array_equal(other.final(), await alone(params("stays", num_steps=8)))


async def preempted(back_sink: RecordingSink) -> tuple[WatchedModel, WorkerMetrics]:
    """A background picture that gives its only place to a realtime one on its way."""
    model, metrics = WatchedModel(), WorkerMetrics()
    half = asyncio.Event()
    loop = asyncio.get_running_loop()
    model.between = lambda: loop.call_soon_threadsafe(half.set) and None if len(model.passes) == 3 else None
    async with opened(model, slots=1, metrics=metrics) as engine:
        background = asyncio.create_task(
            engine.run(
                picture_item("b", params("back", num_steps=40), priority_class=PriorityClass.BACKGROUND), back_sink
            )
        )
        await half.wait()
        await engine.run(picture_item("r", params("now")), RecordingSink())
        assert not background.done()
        await background
    return model, metrics


@pytest.mark.parametrize("sink", [RecordingSink(), RecordingSink(is_full=True), RecordingSink(loses_parked=True)])
async def test_a_preempted_picture_equals_its_lone_run(sink: RecordingSink) -> None:
    model, metrics = await preempted(sink)

    first, last = model.passes.index(("now",)), len(model.passes) - 1 - model.passes[::-1].index(("now",))
    assert ("back",) not in model.passes[first:last]
    np.testing.assert_array_equal(sink.final(), await alone(params("back", num_steps=40)))
    assert metrics.registry.get_sample_value("fleet_diffusion_parked_total", {"model": "painter"}) == 1
    assert sink.parked == {}


async def test_a_picture_that_fails_does_not_take_the_others_with_it() -> None:
    sinks = [RecordingSink() for _ in range(3)]
    async with opened(WatchedModel(fail_prompts=["bad"])) as engine:
        outcomes = await asyncio.gather(
            *(
                engine.run(picture_item(name, params(name)), sink)
                for name, sink in zip(["a", "bad", "c"], sinks, strict=True)
            ),
            return_exceptions=True,
        )

    assert isinstance(outcomes[1], EngineError)
    for name, sink in (("a", sinks[0]), ("c", sinks[2])):
        np.testing.assert_array_equal(sink.final(), await alone(params(name)))


async def test_pictures_that_do_not_fit_together_are_made_in_smaller_passes() -> None:
    sinks = [RecordingSink() for _ in range(4)]
    model = WatchedModel(max_pictures=2)
    async with opened(model) as engine:
        await asyncio.gather(*(engine.run(picture_item(str(i), params(f"p{i}")), sinks[i]) for i in range(4)))

    assert max(len(together) for together in model.passes) == 2
    for i, sink in enumerate(sinks):
        np.testing.assert_array_equal(sink.final(), await alone(params(f"p{i}")))


async def test_what_is_over_the_limits_never_reaches_the_model() -> None:
    model = WatchedModel()
    async with opened(model) as engine:
        with pytest.raises(InvalidInputError) as refused:
            await engine.run(picture_item("x", params("x", width=1024)), RecordingSink())

    assert refused.value.param == "size"
    assert model.passes == []


async def test_progress_rises_and_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PROGRESS_S", 0.05)
    sink = RecordingSink()
    async with opened(ScriptedModel({"cost_s": 0.01})) as engine:
        await engine.run(picture_item("x", params("x", num_steps=16)), sink)

    assert 1 <= len(sink.ratios) < 16
    assert sink.ratios == sorted(sink.ratios)


async def test_a_stopped_engine_fails_what_it_holds_and_takes_no_more() -> None:
    sink = RecordingSink()
    async with opened(ScriptedModel({"cost_s": 0.01})) as engine:
        running = asyncio.create_task(engine.run(picture_item("x", params("x", num_steps=200)), sink))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineDeadError):
            await running
        assert not engine.is_alive()
        with pytest.raises(EngineDeadError):
            await engine.run(picture_item("y", params("y")), sink)
