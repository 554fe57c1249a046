"""How many of a hundred fresh scenes, drawn as in no training, the local model answers right; real engines, HTTP."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fleet_cli.testing import running_fleet
from loadtests.bench.figure import Figure
from tests.support.skills import SKILLS, ask

NUM_TASKS = 100


def figures() -> list[Figure]:
    """`picture_NAME_right` for each skill, beside what is required of it."""
    found = []
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder) / "fleet", {}) as fleet:
        for skill, (_, required) in SKILLS.items():
            outcomes = ask(fleet.url, skill, NUM_TASKS)
            for outcome in outcomes:
                if not outcome.is_right:
                    print(f"  {skill}: {outcome.task.text} -> {outcome.answer}  ({outcome.task.scene})", flush=True)
            right = sum(outcome.is_right for outcome in outcomes)
            found.append(Figure(f"picture_{skill}_right", right, "of 100", required, right / required, "required"))
    return found
