"""What the local vision-language model must be able to do, asked over HTTP about scenes it has never seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from tests.support import scenes
from tests.support.scenes import Scene, data_url, picture_message, render

MODEL = "omnifleet-vlm"
NUM_CLIENTS = 8
MAX_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Task:
    """A scene, a question about it, and the rule that tells right answers from wrong ones."""

    scene: Scene
    text: str
    is_right: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A task and what the model said; wrong ones are printed."""

    task: Task
    answer: str

    @property
    def is_right(self) -> bool:
        """Whether the answer is right."""
        return self.task.is_right(self.answer)


Maker = Callable[[random.Random], Task]


def _several(rng: random.Random) -> Scene:
    return scenes.random_scene(rng, rng.choice((1, 2, 3)))


def _describe(rng: random.Random) -> Task:
    scene = _several(rng)
    return Task(scene, "Describe the picture.", scene.is_named_in)


def _asked(draw: Callable[[random.Random], Scene], ask: Callable[[Scene, random.Random], scenes.Question]) -> Maker:
    def make(rng: random.Random) -> Task:
        scene = draw(rng)
        question = ask(scene, rng)
        return Task(scene, question.text, question.is_answered_by)

    return make


#: Name -> how its tasks are made, and how many of a hundred must be right.
SKILLS: dict[str, tuple[Maker, int]] = {
    "description": (_describe, 95),
    "count": (_asked(_several, scenes.count_question), 90),
    "colour": (_asked(_several, scenes.colour_question), 90),
    "position": (_asked(_several, scenes.place_question), 85),
    "digit": (_asked(scenes.random_digit, scenes.digit_question), 90),
}


def ask(url: str, skill: str, num_tasks: int, seed: int | None = None) -> list[Outcome]:
    """Ask `num_tasks` fresh questions of one skill at the fleet behind `url`, a few at a time, greedily."""
    rng = random.Random(seed)
    tasks = [SKILLS[skill][0](rng) for _ in range(num_tasks)]
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(lambda task: Outcome(task, _answer(client, task)), tasks))


def _answer(client: httpx.Client, task: Task) -> str:
    message = picture_message(data_url(render(task.scene), task.scene.file_format), task.text)
    body = {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": MAX_TOKENS}
    response = client.post("/v1/chat/completions", json=body).raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])
