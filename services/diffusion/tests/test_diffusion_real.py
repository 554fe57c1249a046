"""Real pipelines, tiny and random: what is made in company equals what diffusers itself makes alone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fleet_common.errors import CancelledWorkError, InvalidInputError
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import PriorityClass
from fleet_contracts.diffusion import DiffusionParams
from fleet_diffusion.core.canvas import Canvas
from fleet_diffusion.core.limits import Caps
from fleet_diffusion.core.steps import StepPolicy
from fleet_diffusion.engine.port import PictureRequest
from fleet_diffusion.testing import RecordingSink, picture_item
from fleet_diffusion.worker import DiffusionEngine

pytestmark = pytest.mark.models

CAPS = Caps(max_side=64, max_pixels=64 * 64, max_steps=100, max_pictures=8, max_prompt_chars=1000)
#: What `__call__` of a pipeline needs to do what the others do.
CALL_ARGS = {"pixart": {"use_resolution_binning": False, "clean_caption": False}}


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_pipelines", Path(__file__).parent / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pipelines(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folder and diffusers' own pipeline by kind."""
    root = tmp_path_factory.mktemp("pipelines")
    return {
        "sd": (root / "sd", tiny.stable_diffusion(root / "sd")),
        "sd-dpm": (root / "sd-dpm", tiny.stable_diffusion(root / "sd-dpm", "dpm")),
        "sd-euler-a": (root / "sd-euler-a", tiny.stable_diffusion(root / "sd-euler-a", "euler_a")),
        "sdxl": (root / "sdxl", tiny.stable_diffusion_xl(root / "sdxl")),
        "sd3": (root / "sd3", tiny.stable_diffusion_3(root / "sd3")),
        "pixart": (root / "pixart", tiny.pixart(root / "pixart")),
    }


def model(folder: Path, **engine_args: object) -> Any:
    from fleet_diffusion.engine.real import DiffusersModel

    return DiffusersModel(str(folder), engine_args, num_threads=1, cache_bytes=1 << 20)


@asynccontextmanager
async def opened(painter: Any, *, slots: int = 8) -> AsyncIterator[DiffusionEngine]:
    engine = DiffusionEngine(painter, WorkerMetrics(), name="painter", caps=CAPS, policy=StepPolicy(slots, 8), lanes=16)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def wanted(number: int, **more: object) -> DiffusionParams:
    """Requests that differ in everything but the size."""
    return DiffusionParams(
        **{
            "width": 32,
            "height": 32,
            "prompt": ("red star", "green circle")[number % 2],
            "negative_prompt": ("", "circle")[number % 2],
            "num_steps": (6, 12)[number % 2],
            "guidance": (3.0, 1.0, 5.0)[number % 3],
            "seed": number,
            **more,
        }
    )  # type: ignore[arg-type]


def by_diffusers(pipe: Any, kind: str, params: DiffusionParams) -> np.ndarray:
    import torch

    made = pipe(
        params.prompt,
        negative_prompt=params.negative_prompt or ("" if kind == "pixart" else None),
        width=params.width,
        height=params.height,
        num_inference_steps=params.num_steps,
        guidance_scale=params.guidance,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        **CALL_ARGS.get(kind, {}),
    )
    return np.array(made.images[0])


def assert_same_picture(made: np.ndarray, reference: np.ndarray) -> None:
    assert made.shape == reference.shape
    assert np.abs(made.astype(int) - reference.astype(int)).max() <= 1
    assert reference.std() > 5, "a flat picture proves nothing"


@pytest.mark.parametrize(
    ("kind", "num_requests"),
    [("sd", 2), ("sd", 8), ("sd-dpm", 3), ("sd-euler-a", 3), ("sdxl", 3), ("sd3", 3), ("pixart", 3)],
)
async def test_pictures_made_in_company_equal_diffusers_own_lone_run(
    pipelines: dict[str, tuple[Path, Any]], kind: str, num_requests: int
) -> None:
    """Case C28: concurrent requests with steps 6 and 12 mixed, each with its scheduler and seed."""
    folder, pipe = pipelines[kind]
    painter = model(folder)
    passes: list[set[int]] = []
    moved = asyncio.Event()
    loop = asyncio.get_running_loop()
    step = painter.step

    def watched(pictures: list[Any]) -> None:
        passes.append({picture.index for picture in pictures})
        step(pictures)
        loop.call_soon_threadsafe(moved.set)

    painter.step = watched
    sinks = [RecordingSink() for _ in range(num_requests)]
    async with opened(painter) as engine:
        runs = []
        for number in range(num_requests):
            runs.append(asyncio.create_task(engine.run(picture_item(str(number), wanted(number)), sinks[number])))
            if number == 0:
                await moved.wait()
        await asyncio.gather(*runs)

    assert any(len(steps) > 1 for steps in passes), "nobody was at another step than the others"
    for number, sink in enumerate(sinks):
        assert_same_picture(sink.final(), by_diffusers(pipe, kind, wanted(number)))


@pytest.mark.parametrize("kind", ["sd", "sd-dpm", "sd-euler-a"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_an_edit_parked_on_its_way_equals_diffusers_own(
    pipelines: dict[str, tuple[Path, Any]], kind: str, is_masked: bool
) -> None:
    import torch
    from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
    from PIL import Image

    folder, pipe = pipelines[kind]
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    mask = np.zeros((32, 32), np.bool_)
    mask[:, 16:] = True
    painter = model(folder)
    painter.load()
    picture = painter.begin(request(num_steps=10, canvas=Canvas(pixels, 0.6, mask if is_masked else None)))
    for number in range(picture.num_steps):
        painter.step([picture, painter.begin(request(seed=9))])
        if number == 2:
            painter.put_back(picture, painter.take_out(picture))
    made = painter.pixels(picture)

    own = (StableDiffusionInpaintPipeline if is_masked else StableDiffusionImg2ImgPipeline)(**pipe.components)
    own.set_progress_bar_config(disable=True)
    more = {"mask_image": Image.fromarray(mask.astype(np.uint8) * 255), "width": 32, "height": 32} if is_masked else {}
    reference = own(
        "red star",
        image=Image.fromarray(pixels),
        strength=0.6,
        num_inference_steps=10,
        guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(0),
        **more,
    ).images[0]
    assert picture.num_steps == 6
    if not (is_masked and kind == "sd-euler-a"):  # there diffusers draws numbers for a second encoding it never uses
        assert_same_picture(made, np.array(reference))


@pytest.mark.parametrize("kind", ["sd3", "pixart", "sdxl"])
def test_every_family_edits_and_company_changes_nothing(pipelines: dict[str, tuple[Path, Any]], kind: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    mask = np.zeros((32, 32), np.bool_)
    mask[:, 16:] = True
    painter = model(pipelines[kind][0])
    assert painter.load().takes_images

    def made(company: int) -> np.ndarray:
        picture = painter.begin(request(num_steps=6, canvas=Canvas(pixels, 0.7, mask)))
        others = [painter.begin(request(seed=seed, num_steps=8)) for seed in range(1, company + 1)]
        for _ in range(picture.num_steps):
            painter.step([picture, *others])
        return painter.pixels(picture)

    assert_same_picture(made(2), made(0))


@pytest.mark.parametrize("kind", ["sd", "sd-dpm", "sd-euler-a", "sd3"])
async def test_a_preempted_picture_equals_diffusers_own_undisturbed_run(
    pipelines: dict[str, tuple[Path, Any]], kind: str
) -> None:
    folder, pipe = pipelines[kind]
    painter = model(folder)
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    step = painter.step

    def watched(pictures: list[Any]) -> None:
        step(pictures)
        if pictures[0].index == 3:
            loop.call_soon_threadsafe(begun.set)

    painter.step = watched
    sink = RecordingSink()
    params = wanted(0, num_steps=30)
    async with opened(painter, slots=1) as engine:
        item = picture_item("back", params, priority_class=PriorityClass.BACKGROUND)
        background = asyncio.create_task(engine.run(item, sink))
        await begun.wait()
        await engine.run(picture_item("now", wanted(1)), RecordingSink())
        await background

    assert sink.num_parked >= 1
    assert_same_picture(sink.final(), by_diffusers(pipe, kind, params))


async def test_a_cancelled_picture_leaves_within_one_step(pipelines: dict[str, tuple[Path, Any]]) -> None:
    folder, pipe = pipelines["sd"]
    painter = model(folder)
    gone, stays = RecordingSink(), RecordingSink()
    seen: list[bool] = []
    step = painter.step

    def watched(pictures: list[Any]) -> None:
        step(pictures)
        seen.append(any(picture.request.seed == 1 for picture in pictures))
        gone.cancelled = gone.cancelled or sum(seen) == 2

    painter.step = watched
    async with opened(painter) as engine:
        outcomes = await asyncio.gather(
            engine.run(picture_item("gone", wanted(1)), gone),
            engine.run(picture_item("stays", wanted(2)), stays),
            return_exceptions=True,
        )

    assert isinstance(outcomes[0], CancelledWorkError)
    assert sum(seen) == 2
    assert_same_picture(stays.final(), by_diffusers(pipe, "sd", wanted(2)))


async def test_a_partial_picture_is_the_picture_after_that_step(pipelines: dict[str, tuple[Path, Any]]) -> None:
    sink = RecordingSink()
    async with opened(model(pipelines["sd"][0])) as engine:
        await engine.run(picture_item("p", wanted(0, num_partial=2)), sink)

    assert [kept.is_final for kept in sink.pictures] == [False, False, True]
    first, second, final = (kept.pixels.astype(int) for kept in sink.pictures)
    assert np.abs(first - final).mean() > np.abs(second - final).mean() > 0


def request(**more: object) -> PictureRequest:
    return PictureRequest(
        **{
            "prompt": "red star",
            "negative_prompt": "",
            "width": 32,
            "height": 32,
            "num_steps": 4,
            "guidance": 3.0,
            "seed": 0,
            "tenant": "a",
            **more,
        }
    )  # type: ignore[arg-type]


def test_a_prompt_is_encoded_once_for_each_tenant(pipelines: dict[str, tuple[Path, Any]]) -> None:
    painter = model(pipelines["sd"][0])
    painter.load()
    encoder = painter._pipe.text_encoder
    calls = []
    encoder.register_forward_hook(lambda *_: calls.append(1))

    first = painter.begin(request())
    num_calls = len(calls)
    again = painter.begin(request(seed=5))
    assert len(calls) == num_calls
    other = painter.begin(request(tenant="b"))

    assert (first.was_cached, again.was_cached, other.was_cached) == (False, True, False)
    assert len(calls) == 2 * num_calls


@pytest.mark.parametrize("param", ["prompt", "negative_prompt"])
def test_a_text_the_encoder_would_cut_is_refused(pipelines: dict[str, tuple[Path, Any]], param: str) -> None:
    painter = model(pipelines["sd"][0])
    painter.load()

    with pytest.raises(InvalidInputError) as refused:
        painter.begin(request(**{param: "a" * 40}))

    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_a_pipeline_of_another_class_is_refused_by_name(pipelines: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(pipelines["sd"][0], folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "KandinskyPipeline"}))

    with pytest.raises(ValueError, match=r"KandinskyPipeline.*StableDiffusionPipeline"):
        model(folder).load()


def test_pickled_weights_are_not_loaded(pipelines: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(pipelines["sd"][0], folder)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))

    with pytest.raises(OSError, match="safetensors"):
        model(folder).load()


def test_engine_args_reach_diffusers(pipelines: dict[str, tuple[Path, Any]]) -> None:
    import torch

    painter = model(pipelines["sd"][0], torch_dtype="bfloat16")
    painter.load()

    assert painter._pipe.unet.dtype == torch.bfloat16
    picture = painter.begin(request())
    before = picture.latents.clone()
    painter.put_back(picture, painter.take_out(picture))
    assert torch.equal(before, picture.latents)


def test_facts_follow_the_folder(pipelines: dict[str, tuple[Path, Any]]) -> None:
    facts = {kind: model(folder).load() for kind, (folder, _) in pipelines.items() if kind in ("sd", "sd3")}

    assert (facts["sd"].default_width, facts["sd"].size_step, facts["sd"].default_steps) == (32, 2, 50)
    assert (facts["sd3"].default_width, facts["sd3"].size_step, facts["sd3"].default_steps) == (32, 4, 28)
    assert facts["sd"].revision != facts["sd3"].revision


def test_what_the_safety_checker_refuses_is_not_shown(pipelines: dict[str, tuple[Path, Any]]) -> None:
    painter = model(pipelines["sd"][0])
    painter.load()
    painter._pipe.safety_checker = lambda images, clip_input: (images, [True])
    painter._pipe.feature_extractor = lambda images, return_tensors: _Features()

    with pytest.raises(InvalidInputError) as refused:
        painter.pixels(painter.begin(request()))

    assert refused.value.code == "content_policy_violation"


class _Features:
    """What a feature extractor gives."""

    def __init__(self) -> None:
        import torch

        self.pixel_values = torch.zeros(1, 3, 8, 8)

    def to(self, device: object) -> _Features:
        return self
