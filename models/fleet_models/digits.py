"""Digits as masks: fonts where there are any, strokes, seven segments, and small bitmaps."""

import functools
import math
import random
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Point = tuple[float, float]

# Strokes in a box one unit high and 0.6 wide, y down; an arc is (x, y, x radius, y radius, from, to) in degrees.
_ARC, _LINE = "arc", "line"
_STROKES: dict[str, tuple[tuple[tuple[str, tuple[float, ...]], ...], ...]] = {
    "0": (((_ARC, (0.3, 0.5, 0.28, 0.48, 0, 360)),), ((_ARC, (0.3, 0.5, 0.2, 0.48, 0, 360)),)),
    "1": (
        ((_LINE, (0.12, 0.2, 0.34, 0.02, 0.34, 0.98)),),
        ((_LINE, (0.3, 0.02, 0.3, 0.98)),),
        ((_LINE, (0.14, 0.2, 0.34, 0.02, 0.34, 0.98)), (_LINE, (0.12, 0.98, 0.56, 0.98))),
    ),
    "2": (
        ((_ARC, (0.3, 0.28, 0.26, 0.26, 180, 395)), (_LINE, (0.52, 0.43, 0.04, 0.98, 0.58, 0.98))),
        ((_ARC, (0.3, 0.26, 0.24, 0.24, 200, 380)), (_LINE, (0.53, 0.34, 0.4, 0.6, 0.05, 0.97, 0.56, 0.97))),
    ),
    "3": (
        ((_ARC, (0.28, 0.26, 0.25, 0.24, 200, 450)), (_ARC, (0.28, 0.73, 0.28, 0.25, 270, 520))),
        ((_LINE, (0.06, 0.03, 0.54, 0.03, 0.28, 0.42)), (_ARC, (0.28, 0.7, 0.27, 0.28, 270, 510))),
    ),
    "4": (
        ((_LINE, (0.42, 0.98, 0.42, 0.02, 0.03, 0.68, 0.58, 0.68)),),
        ((_LINE, (0.1, 0.02, 0.08, 0.55, 0.56, 0.55)), (_LINE, (0.44, 0.02, 0.44, 0.98))),
    ),
    "5": (
        ((_LINE, (0.53, 0.03, 0.12, 0.03, 0.08, 0.47)), (_ARC, (0.28, 0.67, 0.28, 0.31, 225, 505))),
        ((_LINE, (0.54, 0.02, 0.08, 0.02, 0.08, 0.42, 0.3, 0.4)), (_ARC, (0.28, 0.69, 0.28, 0.29, 270, 500))),
    ),
    "6": (
        ((_ARC, (0.3, 0.68, 0.26, 0.29, 0, 360)), (_ARC, (0.52, 0.68, 0.48, 0.66, 180, 265))),
        ((_ARC, (0.3, 0.7, 0.25, 0.27, 0, 360)), (_LINE, (0.48, 0.03, 0.2, 0.34, 0.06, 0.66))),
    ),
    "7": (
        ((_LINE, (0.04, 0.03, 0.56, 0.03, 0.2, 0.98)),),
        ((_LINE, (0.04, 0.03, 0.56, 0.03, 0.22, 0.98)), (_LINE, (0.16, 0.5, 0.5, 0.5))),
        ((_LINE, (0.05, 0.16, 0.05, 0.03, 0.55, 0.03, 0.3, 0.5, 0.24, 0.98)),),
    ),
    "8": (
        ((_ARC, (0.3, 0.26, 0.23, 0.24, 0, 360)), (_ARC, (0.3, 0.74, 0.27, 0.25, 0, 360))),
        ((_ARC, (0.3, 0.26, 0.24, 0.24, 0, 360)), (_ARC, (0.3, 0.74, 0.24, 0.24, 0, 360))),
    ),
    "9": (
        ((_ARC, (0.3, 0.32, 0.26, 0.29, 0, 360)), (_ARC, (0.08, 0.32, 0.48, 0.66, 0, 85))),
        ((_ARC, (0.28, 0.29, 0.25, 0.27, 0, 360)), (_LINE, (0.53, 0.3, 0.53, 0.98))),
        ((_ARC, (0.3, 0.3, 0.25, 0.27, 0, 360)), (_LINE, (0.54, 0.34, 0.4, 0.66, 0.14, 0.97))),
    ),
}
# Which of seven segments are lit: top, upper left, upper right, middle, lower left, lower right, bottom.
_SEGMENTS = {
    "0": "1110111",
    "1": "0010010",
    "2": "1011101",
    "3": "1011011",
    "4": "0111010",
    "5": "1101011",
    "6": "1101111",
    "7": "1010010",
    "8": "1111111",
    "9": "1111011",
}
_BITMAPS = {
    "0": ("01110 10001 10011 10101 11001 10001 01110", "111 101 101 101 111"),
    "1": ("00100 01100 00100 00100 00100 00100 01110", "010 110 010 010 111"),
    "2": ("01110 10001 00001 00010 00100 01000 11111", "111 001 111 100 111"),
    "3": ("11111 00010 00100 00010 00001 10001 01110", "111 001 111 001 111"),
    "4": ("00010 00110 01010 10010 11111 00010 00010", "101 101 111 001 001"),
    "5": ("11111 10000 11110 00001 00001 10001 01110", "111 100 111 001 111"),
    "6": ("00110 01000 10000 11110 10001 10001 01110", "111 100 111 101 111"),
    "7": ("11111 00001 00010 00100 01000 01000 01000", "111 001 001 010 010"),
    "8": ("01110 10001 10001 01110 10001 10001 01110", "111 101 111 101 111"),
    "9": ("01110 10001 10001 01111 00001 00010 01100", "111 101 111 001 111"),
}
_FONT_FOLDERS = ("/usr/share/fonts",)
_UNWANTED = ("Math", "Symbol", "icon", "awesome", "emoji", "Dingbat", "BarCode")
GLYPH_SIDE_PX = 160


def glyph_mask(digit: str, rng: random.Random) -> "Image":
    """A digit, white on black, cropped to its ink: mode L, at most about GLYPH_SIDE_PX high."""
    way = rng.random()
    if way < 0.55 and font_paths():
        mask = _from_font(digit, rng.choice(font_paths()))
    elif way < 0.65:
        mask = _from_font(digit, None)
    elif way < 0.85:
        mask = _from_strokes(digit, rng)
    elif way < 0.93:
        mask = _from_segments(digit, rng)
    else:
        mask = _from_bitmap(digit, rng)
    mask = _distort(mask, rng)
    box = mask.getbbox()
    return mask.crop(box) if box else mask


@functools.cache
def font_paths() -> tuple[Path, ...]:
    """Font files of installed font packages and of the system that have plain digits, in a fixed order."""
    from PIL import ImageFont

    roots = [*map(Path, _FONT_FOLDERS), *map(Path, site.getsitepackages()), *map(Path, sys.path[:0])]
    found: dict[str, Path] = {}
    for root in roots:
        for suffix in ("*.ttf", "*.otf"):
            for path in sorted(root.rglob(suffix)):
                if not any(word.lower() in path.name.lower() for word in _UNWANTED):
                    found.setdefault(path.name, path)
    usable = []
    for name in sorted(found):
        try:
            font = ImageFont.truetype(str(found[name]), 40)
            boxes = [font.getmask(digit).getbbox() for digit in "0123456789"]
        except OSError:
            continue
        if all(boxes) and len({bytes(font.getmask(digit)) for digit in "0123456789"}) == 10:
            usable.append(found[name])
    return tuple(usable)


def _from_font(digit: str, path: Path | None) -> "Image":
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(GLYPH_SIDE_PX) if path is None else ImageFont.truetype(str(path), GLYPH_SIDE_PX)
    image = Image.new("L", (GLYPH_SIDE_PX * 2, GLYPH_SIDE_PX * 2))
    ImageDraw.Draw(image).text((GLYPH_SIDE_PX // 2, GLYPH_SIDE_PX // 4), digit, fill=255, font=font)
    return image


def _from_strokes(digit: str, rng: random.Random) -> "Image":
    from PIL import Image, ImageDraw

    image = Image.new("L", (GLYPH_SIDE_PX, GLYPH_SIDE_PX * 3 // 2))
    pen = ImageDraw.Draw(image)
    width = rng.uniform(0.05, 0.2) * GLYPH_SIDE_PX
    wobble = rng.choice((0.0, 0.02))
    is_round = rng.random() < 0.7
    for how, numbers in rng.choice(_STROKES[digit]):
        points = _arc_points(numbers) if how == _ARC else list(zip(numbers[::2], numbers[1::2], strict=True))
        placed = [
            (
                (0.2 + x * 0.95 + rng.uniform(-wobble, wobble)) * GLYPH_SIDE_PX,
                (0.25 + y + rng.uniform(-wobble, wobble)) * GLYPH_SIDE_PX,
            )
            for x, y in points
        ]
        pen.line(placed, fill=255, width=round(width), joint="curve")
        if is_round:
            for x, y in (placed[0], placed[-1], *(placed if how == _LINE else ())):
                pen.ellipse([x - width / 2, y - width / 2, x + width / 2, y + width / 2], fill=255)
    return image


def _arc_points(numbers: Sequence[float]) -> list[Point]:
    x, y, x_radius, y_radius, start, end = numbers
    num_points = 24
    angles = [math.radians(start + (end - start) * i / num_points) for i in range(num_points + 1)]
    return [(x + x_radius * math.cos(a), y + y_radius * math.sin(a)) for a in angles]


def _from_segments(digit: str, rng: random.Random) -> "Image":
    from PIL import Image, ImageDraw

    thick, gap = rng.uniform(0.07, 0.2), rng.choice((0.0, 0.015, 0.03))
    wide = rng.uniform(0.45, 0.7)
    ends = (
        ((0, 0), (1, 0)),
        ((0, 0), (0, 1)),
        ((1, 0), (1, 1)),
        ((0, 1), (1, 1)),
        ((0, 1), (0, 2)),
        ((1, 1), (1, 2)),
        ((0, 2), (1, 2)),
    )
    pointed = rng.random() < 0.5
    image = Image.new("L", (GLYPH_SIDE_PX * 2, GLYPH_SIDE_PX * 2))
    pen = ImageDraw.Draw(image)
    for lit, ((x0, y0), (x1, y1)) in zip(_SEGMENTS[digit], ends, strict=True):
        if lit == "0":
            continue
        half = thick / 2
        inner, reach = (half, 0.0) if pointed else (0.0, half - gap)
        left, top, right, bottom = x0 * wide, y0 * 0.5, x1 * wide, y1 * 0.5
        if y0 == y1:
            a, b = left + gap - reach, right - gap + reach
            shape = [(a, top), (a + inner, top - half), (b - inner, top - half), (b, top), (b - inner, top + half)]
            shape.append((a + inner, top + half))
        else:
            a, b = top + gap - reach, bottom - gap + reach
            shape = [(left, a), (left + half, a + inner), (left + half, b - inner), (left, b), (left - half, b - inner)]
            shape.append((left - half, a + inner))
        pen.polygon([((0.4 + x) * GLYPH_SIDE_PX, (0.4 + y) * GLYPH_SIDE_PX) for x, y in shape], fill=255)
    return image


def _from_bitmap(digit: str, rng: random.Random) -> "Image":
    from PIL import Image

    rows = rng.choice(_BITMAPS[digit]).split()
    image = Image.new("L", (len(rows[0]) + 2, len(rows) + 2))
    for y, row in enumerate(rows):
        for x, bit in enumerate(row):
            image.putpixel((x + 1, y + 1), 255 if bit == "1" else 0)
    scale = GLYPH_SIDE_PX // len(rows)
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def _distort(mask: "Image", rng: random.Random) -> "Image":
    """Stretch, slant and turn a little; half of the digits stay as they are."""
    from PIL import Image, ImageOps

    box = mask.getbbox()
    mask = ImageOps.expand(mask.crop(box) if box else mask, GLYPH_SIDE_PX // 4)
    if rng.random() < 0.5:
        return mask
    stretch = rng.uniform(0.75, 1.3)
    mask = mask.resize((round(mask.width * stretch), mask.height), Image.Resampling.BILINEAR)
    slant = rng.choice((0.0, rng.uniform(-0.1, 0.25)))
    middle = mask.height / 2
    mask = mask.transform(mask.size, Image.Transform.AFFINE, (1, slant, -slant * middle, 0, 1, 0))
    return mask.rotate(rng.choice((0.0, rng.uniform(-12, 12))), Image.Resampling.BILINEAR)
