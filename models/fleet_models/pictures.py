"""Rendered scenes in bulk for training: chunks of pictures and labels in files, so that an interrupted run goes on."""

import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fleet_models.colours import COLOURS
from fleet_models.drawing import random_drawing, render
from fleet_models.scenes import KINDS, MAX_ITEMS, random_scene
from fleet_models.tower import IMAGE_SIDE_PX
from fleet_models.training import say

SCENES_PER_CHUNK = 500
MAP_SIDE = 56
VERSION = "1"
NO_KIND, NO_COLOUR = len(KINDS), len(COLOURS)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Rendered scenes, numpy arrays (pixels and maps may lie in a file).

    pixels: uint8 [num, side, side, 3]; maps: uint8 [num, MAP_SIDE, MAP_SIDE], 0 background, else 1 + item index;
    kinds, colours: int64 [num, MAX_ITEMS], NO_KIND and NO_COLOUR where there is no item; places: float32
    [num, MAX_ITEMS, 2], x and y; backgrounds: int64 [num].
    """

    pixels: Any
    maps: Any
    kinds: Any
    colours: Any
    places: Any
    backgrounds: Any


def load_chunks(cache: Path, seed: int, num_chunks: int) -> list[Pictures]:
    """Scenes by chunks, each rendered once into `cache`; a chunk depends on seed and number alone."""
    import numpy as np

    folder = cache / f"scenes-{VERSION}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(folder / f"{chunk}.npy", folder / f"{chunk}.npz") for chunk in range(num_chunks)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        missing = [chunk for chunk, (_, labels) in enumerate(paths) if not labels.exists()]
        rendered = [pool.submit(_render_chunk, f"{seed}/{chunk}", *map(str, paths[chunk])) for chunk in missing]
        for number, future in enumerate(rendered, 1):
            future.result()
            say(f"rendered {number}/{len(rendered)} x {SCENES_PER_CHUNK} scenes")
    found = []
    for pixels, label_path in paths:
        with np.load(label_path) as labels:
            found.append(Pictures(np.load(pixels, mmap_mode="r"), **{name: labels[name] for name in labels.files}))
    return found


def _render_chunk(seed: str, pixel_path: str, label_path: str) -> None:
    import numpy as np
    from PIL import Image

    rng = random.Random(seed)
    # Mostly the image processor's own filter; a little of the others, for whoever resizes first.
    filters = [Image.Resampling.BICUBIC] * 6 + [Image.Resampling.BILINEAR, Image.Resampling.LANCZOS]
    pixels = np.zeros((SCENES_PER_CHUNK, IMAGE_SIDE_PX, IMAGE_SIDE_PX, 3), np.uint8)
    labels: dict[str, Any] = {
        "maps": np.zeros((SCENES_PER_CHUNK, MAP_SIDE, MAP_SIDE), np.uint8),
        "kinds": np.full((SCENES_PER_CHUNK, MAX_ITEMS), NO_KIND, np.int64),
        "colours": np.full((SCENES_PER_CHUNK, MAX_ITEMS), NO_COLOUR, np.int64),
        "places": np.zeros((SCENES_PER_CHUNK, MAX_ITEMS, 2), np.float32),
        "backgrounds": np.zeros(SCENES_PER_CHUNK, np.int64),
    }
    for i in range(SCENES_PER_CHUNK):
        scene = random_scene(rng)
        image, masks = render(scene, random_drawing(scene, rng), rng)
        pixels[i] = np.asarray(image.resize((IMAGE_SIDE_PX, IMAGE_SIDE_PX), rng.choice(filters)))
        labels["backgrounds"][i] = COLOURS.index(scene.background)
        for j, (item, mask) in enumerate(zip(scene.items, masks, strict=True)):
            inside = np.asarray(mask.resize((MAP_SIDE, MAP_SIDE), Image.Resampling.BILINEAR)) > 127
            labels["maps"][i][inside] = j + 1
            labels["kinds"][i, j] = KINDS.index(item.kind)
            labels["colours"][i, j] = COLOURS.index(item.colour)
            labels["places"][i, j] = item.x, item.y
    for path, save in ((pixel_path, partial(np.save, arr=pixels)), (label_path, partial(np.savez, **labels))):
        with open(f"{path}.part", "wb") as file:  # noqa: PTH123
            save(file)
        os.replace(f"{path}.part", path)  # noqa: PTH105
