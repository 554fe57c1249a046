"""Measure the vision-language model through the chat path: `python models/tests/measure_vlm.py CACHE [NUM]`.

For each skill, NUM fresh scenes of the independent renderer (tests/support/scenes.py) and of the training renderer:
how many answers are right, with examples of wrong ones. transformers, float32, greedy.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from fleet_models import drawing, prepare
from fleet_models.scenes import random_scene

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support import scenes
from tests.support.skills import SKILLS

BATCH_SIZE = 20
NUM_EXAMPLES = 6
Asked = tuple[Any, str, Callable[[str], bool]]


def answer_all(model: Any, processor: Any, asked: list[Asked], *, picture_first: bool) -> list[str]:
    """Greedy answers to one question about each picture."""
    answers = []
    for start in range(0, len(asked), BATCH_SIZE):
        part = asked[start : start + BATCH_SIZE]
        prompts = []
        for _, question, _ in part:
            parts = [{"type": "image"}, {"type": "text", "text": question}]
            message = {"role": "user", "content": parts if picture_first else parts[::-1]}
            prompts.append(processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
        processor.tokenizer.padding_side = "left"
        inputs = processor(text=prompts, images=[image for image, _, _ in part], padding=True, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        answers += processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


QUESTIONS = {
    "count": scenes.count_question,
    "colour": scenes.colour_question,
    "position": scenes.place_question,
    "digit": scenes.digit_question,
}


def ask_own(skill: str, rng: random.Random) -> Asked:
    """A picture of the training renderer with the same questions; kinds differ, so that "the circle" is one."""
    while True:
        scene = random_scene(rng, digits=float(skill == "digit"))
        if len({item.kind for item in scene.items}) == len(scene.items):
            break
    figures = tuple(scenes.Figure(i.kind, i.colour, (i.x, i.y), i.size / 2) for i in scene.items)
    image, _ = drawing.render(scene, drawing.random_drawing(scene, rng), rng)
    known = scenes.Scene(figures, scene.background, size=0, smooth=True, variant=0, file_format="PNG")
    if skill == "description":
        return image, "Describe the picture.", known.is_named_in
    question = QUESTIONS[skill](known, rng)
    return image, question.text, question.is_answered_by


def draw_tasks(renderer: str, skill: str, num_tasks: int, seed: int) -> list[Asked]:
    """Fresh pictures, questions and rules, by the training renderer ("own") or the independent one ("other")."""
    rng = random.Random(seed)
    if renderer == "own":
        return [ask_own(skill, rng) for _ in range(num_tasks)]
    tasks = [SKILLS[skill][0](rng) for _ in range(num_tasks)]
    return [(scenes.render(task.scene), task.text, task.is_right) for task in tasks]


def main() -> None:
    """Print one line per skill, renderer and order of parts."""
    torch.set_num_threads(1)
    folder = prepare("omnifleet-vlm", Path(sys.argv[1]), print)
    num_tasks = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    for skill in SKILLS:
        for renderer, picture_first in (("other", False), ("other", True), ("own", False)):
            asked = draw_tasks(renderer, skill, num_tasks, seed=99)
            answers = answer_all(model, processor, asked, picture_first=picture_first)
            wrong = [(q, a) for (_, q, is_right), a in zip(asked, answers, strict=True) if not is_right(a)]
            order = "picture first" if picture_first else "picture last"
            print(f"{skill:12} {renderer:5} {order}: {num_tasks - len(wrong)}/{num_tasks}", flush=True)
            print("".join(f"      {q} -> {a}\n" for q, a in wrong[:NUM_EXAMPLES]), end="", flush=True)


if __name__ == "__main__":
    main()
