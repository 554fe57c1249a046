"""The real image model through diffusers' own pipeline, and its training loop. Slow: about half a minute."""

import random
import time

import numpy as np
import pytest

from fleet_models import prepare

pytestmark = pytest.mark.models
NUM_PROMPTS = 20


def ignore(line: str) -> None:
    """Progress nobody reads."""


@pytest.fixture(scope="module")
def pipeline(model_cache):
    from diffusers import DiffusionPipeline

    folder = prepare("omnifleet-image", model_cache, ignore)
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


def test_image_model_is_prepared_once(pipeline, model_cache):
    started_s = time.monotonic()
    folder = prepare("omnifleet-image", model_cache, ignore)

    assert time.monotonic() - started_s < 0.5
    assert type(pipeline).__name__ == "StableDiffusionPipeline"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "scheduler",
        "text_encoder",
        "tokenizer",
        "unet",
        "vae",
    ]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.rglob("*") if path.is_file())


def test_pictures_show_what_was_asked_for(pipeline):
    from fleet_models.image_judge import judge
    from fleet_models.image_prompts import plain_prompt
    from fleet_models.one_shape import random_one_shape
    from fleet_models.train_diffusion import draw

    rng = random.Random(7)
    wanted = [random_one_shape(rng) for _ in range(NUM_PROMPTS)]
    pictures = draw(pipeline, [plain_prompt(scene) for scene in wanted], seed=7)
    verdicts = [judge(np.asarray(picture)) for picture in pictures]
    named = [verdict.seen == scene for scene, verdict in zip(wanted, verdicts, strict=True)]
    coloured = [
        (v.seen.colour, v.seen.background) == (s.colour, s.background) for s, v in zip(wanted, verdicts, strict=True)
    ]

    assert sum(coloured) >= 19, list(zip(wanted, verdicts, strict=True))
    # The card's figure is 80 of 100; by chance it would be 20.
    assert sum(named) >= 13, list(zip(wanted, verdicts, strict=True))


def test_same_seed_gives_the_same_picture_and_another_seed_another(pipeline):
    from fleet_models.train_diffusion import draw

    prompts = ["a red circle on a blue background"] * 2
    first, second = draw(pipeline, prompts, seed=1)
    again = draw(pipeline, prompts[:1], seed=1)[0]

    # Alone and beside another: the same up to the rounding of the processor's matrix products.
    assert np.abs(np.asarray(first, int) - np.asarray(again, int)).max() <= 16
    assert np.abs(np.asarray(first, int) - np.asarray(second, int)).max() > 16


def test_training_that_was_stopped_goes_on_as_if_it_never_was(tmp_path):
    import torch

    from fleet_models.training_stages import Stage, generator_for, run_stage

    def train(num_steps: int, folder, stop_at: int | None = None):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4)

        def loss(step: int):
            if step == stop_at:
                raise KeyboardInterrupt
            x = torch.randn((8, 4), generator=generator_for(0, "toy", step))
            return (module(x) - x.flip(-1)).square().mean()

        run_stage(Stage("toy", module, num_steps, 1e-2, loss, lambda step: "", 10), folder)
        return module.weight.detach()

    whole = train(40, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(40, tmp_path / "halves", stop_at=27)
    resumed = train(40, tmp_path / "halves")

    assert torch.equal(whole, resumed)
