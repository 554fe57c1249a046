"""Measure the image model: `python models/tests/measure_image.py CACHE [NUM] [SHEET.png]`.

Draws NUM (100) scenes from prompts like "a green star on a yellow background", a seed each, and counts how many have
the right shape, colour and background, by geometry and colour distance and by our own vision-language model.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure_vlm import answer_all
from PIL import Image

from fleet_models import prepare
from fleet_models.image_judge import judge
from fleet_models.image_prompts import compose, plain_prompt
from fleet_models.one_shape import OneShape, random_one_shape
from fleet_models.train_diffusion import contact_sheet, draw, summary

SEED = 2026


def load_pipeline(folder: Path) -> Any:
    """The prepared folder as anybody would load it."""
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


def _names(answer: str, scene: OneShape) -> bool:
    """Whether an answer holds every word that was asked for."""
    return {scene.shape, scene.colour, scene.background} <= set(answer.rstrip(".").split())


def seen_by_vlm(cache: Path, pictures: list[Image.Image], wanted: list[OneShape]) -> int:
    """How many pictures our vision-language model describes with the three words asked for."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    folder = prepare("omnifleet-vlm", cache, print)
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    asked = [
        (picture, "Describe the picture.", lambda answer, scene=scene: _names(answer, scene))
        for picture, scene in zip(pictures, wanted, strict=True)
    ]
    answers = answer_all(model, processor, asked, picture_first=True)
    right = [is_right(answer) for (_, _, is_right), answer in zip(asked, answers, strict=True)]
    for scene, answer, ok in zip(wanted, answers, right, strict=True):
        if not ok:
            print(f"      vlm: {scene.caption} -> {answer}")
    return sum(right)


def main() -> None:
    """Print the figures; write the contact sheet where asked."""
    torch.set_num_threads(1)
    cache = Path(sys.argv[1])
    num = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    pipeline = load_pipeline(prepare("omnifleet-image", cache, print))
    rng = random.Random(SEED)
    wanted = [random_one_shape(rng) for _ in range(num)]
    wordings = {"plain": [plain_prompt(scene) for scene in wanted], "free": []}
    free_scenes: list[OneShape] = []
    while len(free_scenes) < num:
        prompt, facts = compose(random_one_shape(rng), rng)
        if "" not in (facts.shape, facts.colour, facts.background):
            free_scenes.append(facts)
            wordings["free"].append(prompt)
    for name, scenes in (("plain", wanted), ("free", free_scenes)):
        pictures = draw(pipeline, wordings[name], SEED)
        if name == "plain" and len(sys.argv) > 3:
            contact_sheet(pictures).save(sys.argv[3])
        verdicts = [judge(np.asarray(picture)) for picture in pictures]
        print(f"{name} wording: {summary(scenes, verdicts)}")
        for scene, verdict in zip(scenes, verdicts, strict=True):
            if not verdict.agrees_with(scene):
                print(f"      {scene} -> {verdict}")
        print(f"{name} wording: {seen_by_vlm(cache, pictures, scenes)}/{num} described right by our own model")


if __name__ == "__main__":
    main()
