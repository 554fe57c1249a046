"""A whole fleet that also draws: real broker and processes, a real (tiny, random) pipeline."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from fleet_cli.testing import RunningFleet, running_fleet, wait_for

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
PROMPT = {"prompt": "red star", "size": "64x64"}


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stable-Diffusion folder with random weights."""
    path = ROOT / "services" / "diffusion" / "tests" / "tiny.py"
    spec = importlib.util.spec_from_file_location("tiny_pipelines", path)
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    folder = tmp_path_factory.mktemp("models") / "tiny-painter"
    tiny.stable_diffusion(folder)
    return folder


@pytest.fixture(scope="module")
def fleet(painter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Everything but the pictures is scripted."""
    settings = {
        "FLEET_ENGINE": "scripted",
        "FLEET_IMAGE_MODEL": str(painter),
        "FLEET_DIFFUSION_ENGINE": "real",
        "FLEET_DIFFUSION_MAX_STEPS": "1000",
        "FLEET_DIFFUSION_REPLICAS": "2",
    }
    with running_fleet(tmp_path_factory.mktemp("fleet"), settings, timeout_s=180.0) as fleet:
        # The chat model is enough to be ready; this one may still be loading.
        shown = f"{fleet.url}/v1/models/tiny-painter"
        wait_for(lambda: httpx.get(shown, timeout=5).json().get("state") == "ready", 180.0, "a model that draws")
        yield fleet


def client_of(fleet: RunningFleet) -> OpenAI:
    return OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=120)


def pixels(b64: str | None) -> np.ndarray:
    assert b64 is not None
    return np.array(Image.open(io.BytesIO(base64.b64decode(b64))).convert("RGB"))


def draw(fleet: RunningFleet, seed: int, steps: int) -> np.ndarray:
    answer = client_of(fleet).images.generate(model="tiny-painter", **PROMPT, extra_body={"seed": seed, "steps": steps})
    assert answer.data is not None
    return pixels(answer.data[0].b64_json)


def test_pictures_and_chats_are_served_by_one_fleet(fleet: RunningFleet) -> None:
    client = client_of(fleet)
    models = {found.id: found.model_dump() for found in client.models.list().data}
    chat = client.chat.completions.create(model="omnifleet-vlm", messages=[{"role": "user", "content": "hi"}])

    assert models["tiny-painter"]["output_modalities"] == ["image"]
    assert chat.choices[0].message.content
    assert draw(fleet, 1, 10).shape == (64, 64, 3)


def png(colour: str) -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(file, "PNG")
    file.seek(0)
    file.name = f"{colour}.png"
    return file


def test_a_picture_is_edited_and_what_the_mask_keeps_stays(fleet: RunningFleet) -> None:
    """Case A26: `image`, and `image[]` as the client sends lists."""
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64))  # see-through: may change
    file = io.BytesIO()
    mask.save(file, "PNG")
    edit = client_of(fleet).images.edit
    more = {"model": "tiny-painter", "prompt": "red star", "size": "64x64", "extra_body": {"seed": 1, "steps": 4}}

    whole = edit(image=png("blue"), **more)
    within = edit(image=png("blue"), mask=("mask.png", file.getvalue(), "image/png"), **more)
    several = edit(image=[png("blue"), png("red")], **more)

    assert whole.data and within.data and several.data
    assert (pixels(within.data[0].b64_json)[:, 32:] == (0, 0, 255)).all()
    assert not (pixels(within.data[0].b64_json)[:, :32] == (0, 0, 255)).all()
    assert not (pixels(whole.data[0].b64_json) == (0, 0, 255)).all()
    assert pixels(several.data[0].b64_json).shape == (64, 64, 3)


def test_a_picture_behind_a_url_is_the_same_file(fleet: RunningFleet) -> None:
    extra = {"seed": 3, "steps": 4}
    generate = client_of(fleet).images.generate
    kept = generate(model="tiny-painter", **PROMPT, response_format="url", extra_body=extra)
    inline = generate(model="tiny-painter", **PROMPT, extra_body=extra)

    assert kept.data and kept.data[0].url and inline.data and inline.data[0].b64_json
    answer = httpx.get(kept.data[0].url, timeout=20)
    assert answer.headers["content-type"] == "image/png"
    assert answer.content == base64.b64decode(inline.data[0].b64_json)


def test_concurrent_pictures_equal_their_lone_runs(fleet: RunningFleet) -> None:
    """Case C28: seeds 1..8, steps 10 and 20 mixed."""
    together: dict[int, np.ndarray] = {}

    def one(seed: int) -> None:
        together[seed] = draw(fleet, seed, (10, 20)[seed % 2])

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for seed in range(1, 9):
        lone = draw(fleet, seed, (10, 20)[seed % 2])
        assert np.abs(together[seed].astype(int) - lone.astype(int)).max() <= 1


def test_a_picture_whose_worker_is_killed_comes_out_the_same(fleet: RunningFleet) -> None:
    undisturbed = draw(fleet, 7, 150)
    body = {"model": "tiny-painter", **PROMPT, "seed": 7, "steps": 150, "stream": True, "partial_images": 1}
    events: list[dict[str, Any]] = []
    is_killed = False
    with httpx.stream("POST", f"{fleet.url}/v1/images/generations", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if not is_killed:
                is_killed = True
                request_id = answer.headers["x-fleet-request-id"]
                (step,) = httpx.get(f"{fleet.url}/v1/requests/{request_id}", timeout=20).json()["steps"]
                os.kill(fleet.stack()["processes"][step["worker"]]["pid"], signal.SIGKILL)

    rows = httpx.get(f"{fleet.url}/v1/requests/{request_id}", timeout=20).json()["steps"]
    assert len(rows) == 2, "the worker was killed too late to matter"
    ratios = [event["done_ratio"] for event in events if "done_ratio" in event]
    assert ratios == sorted(ratios)
    assert events[-1]["type"] == "image_generation.completed"
    assert [event["type"] for event in events].count("image_generation.partial_image") <= 1
    assert np.abs(pixels(events[-1]["b64_json"]).astype(int) - undisturbed.astype(int)).max() <= 1
