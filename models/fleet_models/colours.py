"""Colour names and the values that people mean by them."""

import colorsys
import random

Rgb = tuple[int, int, int]

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")

# CSS, X11, Material, Tailwind and plotting-palette values.
ANCHORS: dict[str, tuple[Rgb, ...]] = {
    "red": (
        (255, 0, 0),
        (220, 20, 60),
        (200, 0, 0),
        (237, 28, 36),
        (244, 67, 54),
        (230, 25, 75),
        (178, 34, 34),
        (239, 68, 68),
        (214, 39, 40),
        (220, 40, 40),
    ),
    "green": (
        (0, 128, 0),
        (0, 255, 0),
        (0, 200, 0),
        (34, 139, 34),
        (76, 175, 80),
        (50, 205, 50),
        (0, 100, 0),
        (34, 197, 94),
        (44, 160, 44),
        (40, 180, 60),
    ),
    "blue": (
        (0, 0, 255),
        (30, 60, 220),
        (33, 150, 243),
        (0, 0, 200),
        (65, 105, 225),
        (30, 144, 255),
        (0, 0, 139),
        (59, 130, 246),
        (31, 119, 180),
        (40, 80, 220),
    ),
    "yellow": (
        (255, 255, 0),
        (255, 235, 59),
        (250, 220, 0),
        (240, 240, 40),
        (255, 225, 25),
        (255, 215, 0),
        (240, 220, 40),
        (250, 230, 60),
    ),
    "purple": (
        (128, 0, 128),
        (160, 32, 240),
        (148, 0, 211),
        (156, 39, 176),
        (102, 51, 153),
        (145, 30, 180),
        (168, 85, 247),
        (148, 103, 189),
        (130, 40, 180),
    ),
    "orange": (
        (255, 165, 0),
        (255, 140, 0),
        (255, 152, 0),
        (245, 130, 48),
        (255, 127, 0),
        (240, 120, 20),
        (249, 115, 22),
        (255, 127, 14),
    ),
    "black": ((0, 0, 0), (0, 0, 0), (10, 10, 10), (20, 20, 20), (30, 30, 30)),
    "white": ((255, 255, 255), (255, 255, 255), (250, 250, 250), (245, 245, 245), (235, 235, 235)),
}


def random_rgb(name: str, rng: random.Random) -> Rgb:
    """A value that people would call `name`, between its known values and jittered a little."""
    if name in ("black", "white"):
        level = rng.randint(0, 40) if name == "black" else rng.randint(225, 255)
        red, green, blue = (min(255, max(0, level + rng.randint(-8, 8))) for _ in range(3))
        return rng.choice((rng.choice(ANCHORS[name]), (red, green, blue)))
    first, second = rng.choices(ANCHORS[name], k=2)
    part = rng.choice((0.0, 0.0, rng.random()))
    hue, lightness, saturation = colorsys.rgb_to_hls(
        *((a + (b - a) * part) / 255 for a, b in zip(first, second, strict=True))
    )
    jitter = rng.choice((0.0, 1.0, 1.0))
    hue = (hue + jitter * rng.uniform(-0.012, 0.012)) % 1.0
    lightness = min(0.95, max(0.05, lightness + jitter * rng.uniform(-0.05, 0.05)))
    saturation = min(1.0, max(0.0, saturation + jitter * rng.uniform(-0.08, 0.05)))
    r, g, b = colorsys.hls_to_rgb(hue, lightness, saturation)
    return round(r * 255), round(g * 255), round(b * 255)
