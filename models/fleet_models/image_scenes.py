"""What the image model is taught to draw: scenes in a narrow range, so that a small model learns clean edges."""

import random
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from fleet_models.colours import Rgb
from fleet_models.one_shape import OneShape, ShapeDrawing, draw_one_shape, random_one_shape

IMAGE_SIDE_PX = 64
SCENES_PER_CHUNK = 500
DIAMETERS = (0.5, 0.74)
SHIFT = 0.08
TILT_RAD = 0.06
JITTER = 10
PALETTE: dict[str, Rgb] = {
    "red": (222, 24, 32),
    "green": (24, 150, 48),
    "blue": (30, 64, 222),
    "yellow": (250, 222, 24),
    "purple": (138, 32, 170),
    "orange": (250, 132, 20),
    "black": (14, 14, 14),
    "white": (246, 246, 246),
}


def narrow_drawing(scene: OneShape, rng: random.Random) -> ShapeDrawing:
    """One way to draw a scene: near the middle, nearly upright, smooth edges, colours close to the palette."""
    return ShapeDrawing(
        side_px=IMAGE_SIDE_PX,
        colour=_near(PALETTE[scene.colour], rng),
        background=_near(PALETTE[scene.background], rng),
        centre=(0.5 + rng.uniform(-SHIFT, SHIFT), 0.5 + rng.uniform(-SHIFT, SHIFT)),
        diameter=rng.uniform(*DIAMETERS),
        rotation=rng.uniform(-TILT_RAD, TILT_RAD),
        inner_ratio=rng.uniform(0.38, 0.46),
        arm_ratio=rng.uniform(0.26, 0.36),
        supersampling=4,
    )


def render_scenes(num_scenes: int, seed: int, num_processes: int) -> tuple[list[OneShape], Any]:
    """Draw scenes; the result depends only on the seed. Pixels are uint8 [num, side, side, 3]."""
    import numpy as np

    seeds = [f"image/{seed}/{chunk}" for chunk in range(-(-num_scenes // SCENES_PER_CHUNK))]
    with ProcessPoolExecutor(num_processes) as pool:
        chunks = list(pool.map(_render_chunk, seeds))
    scenes = [scene for chunk in chunks for scene in chunk[0]][:num_scenes]
    return scenes, np.concatenate([chunk[1] for chunk in chunks])[:num_scenes]


def _render_chunk(seed: str) -> tuple[list[OneShape], Any]:
    import numpy as np

    rng = random.Random(seed)
    scenes = [random_one_shape(rng) for _ in range(SCENES_PER_CHUNK)]
    return scenes, np.stack([np.asarray(draw_one_shape(scene, narrow_drawing(scene, rng))) for scene in scenes])


def _near(rgb: Rgb, rng: random.Random) -> Rgb:
    red, green, blue = (min(255, max(0, level + rng.randint(-JITTER, JITTER))) for level in rgb)
    return red, green, blue
