"""Scenes drawn from formulas with numpy, independent of the renderer the model was trained with."""

from __future__ import annotations

import base64
import io
import itertools
import random
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: CSS values, and a second plausible value where people differ.
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 20, 30)),
    "green": ((0, 128, 0), (0, 200, 0)),
    "blue": ((0, 0, 255), (30, 60, 220)),
    "yellow": ((255, 255, 0), (250, 220, 20)),
    "purple": ((128, 0, 128), (150, 40, 190)),
    "orange": ((255, 165, 0), (255, 130, 0)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (240, 240, 240)),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = tuple("0123456789")


COLUMNS, ROWS = ("left", "middle", "right"), ("top", "middle", "bottom")
COUNT_WORDS = ("zero", "one", "two", "three")


@dataclass(frozen=True, slots=True)
class Figure:
    """A shape or a digit of one colour: its middle and radius in parts of the picture's side."""

    kind: str
    colour: str
    centre: tuple[float, float]
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """Figures on one background, and how they are drawn."""

    figures: tuple[Figure, ...]
    background: str
    size: int
    smooth: bool
    variant: int
    file_format: str

    def is_named_in(self, answer: str) -> bool:
        """Whether a description names every figure with its colour, and the background, each in its place."""
        text = answer.lower()
        what = [f"{f.colour} digit {f.kind}" if f.kind.isdigit() else f"{f.colour} {f.kind}" for f in self.figures]
        return all(words in text for words in what) and f"{self.background} background" in text


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a scene; an answer needs one word of each group, and none of the wrong ones."""

    text: str
    needed: tuple[tuple[str, ...], ...]
    wrong: tuple[str, ...]

    def is_answered_by(self, answer: str) -> bool:
        """Whether an answer says the right thing and nothing else of its kind."""
        words = set(re.findall(r"[a-z]+|[0-9]", answer.lower()))
        return all(words & set(group) for group in self.needed) and not words & set(self.wrong)


def random_scene(rng: random.Random, num_shapes: int = 1) -> Scene:
    """A scene of any size from 64 to 512 pixels, as PNG or JPEG: one shape near the middle, or several in a grid."""
    colours = rng.sample(sorted(COLOURS), num_shapes + 1)
    kinds = rng.sample(SHAPES, num_shapes)
    places = [((rng.uniform(0.42, 0.58), rng.uniform(0.42, 0.58)), rng.uniform(0.25, 0.38))]
    if num_shapes > 1:
        cells = rng.sample([(x, y) for x in range(3) for y in range(3)], num_shapes)
        places = [(_in_cell(x, y, rng), rng.uniform(0.1, 0.145)) for x, y in cells]
    figures = [Figure(kind, colour, *place) for kind, colour, place in zip(kinds, colours, places, strict=False)]
    return _drawn_somehow(figures, colours[-1], rng, small=num_shapes > 1)


def random_digit(rng: random.Random) -> Scene:
    """One digit near the middle."""
    colour, background = rng.sample(sorted(COLOURS), 2)
    centre = rng.uniform(0.44, 0.56), rng.uniform(0.44, 0.56)
    return _drawn_somehow([Figure(rng.choice(DIGITS), colour, centre, rng.uniform(0.22, 0.38))], background, rng)


def _drawn_somehow(figures: list[Figure], background: str, rng: random.Random, *, small: bool = False) -> Scene:
    return Scene(
        figures=tuple(figures),
        background=background,
        size=rng.choice((128, 224, 300, 512) if small else (64, 96, 128, 224, 300, 512)),
        smooth=rng.random() < 0.5,
        variant=rng.randrange(2),
        file_format=rng.choice(("PNG", "JPEG")),
    )


def _in_cell(column: int, row: int, rng: random.Random) -> tuple[float, float]:
    return (column + 0.5) / 3 + rng.uniform(-0.02, 0.02), (row + 0.5) / 3 + rng.uniform(-0.02, 0.02)


def count_question(scene: Scene, rng: random.Random) -> Question:
    """How many shapes there are."""
    count = len(scene.figures)
    others = {n for n in range(10) if n != count}
    wrong = {str(n) for n in others} | {COUNT_WORDS[n] for n in others if n < len(COUNT_WORDS)}
    text = rng.choice(("How many shapes are there?", "How many shapes are in the picture?", "Count the shapes."))
    return Question(text, ((str(count), COUNT_WORDS[count]),), tuple(sorted(wrong)))


def colour_question(scene: Scene, rng: random.Random) -> Question:
    """The colour of one of the shapes."""
    figure = rng.choice(scene.figures)
    wrong = tuple(sorted(set(COLOURS) - {figure.colour}))
    text = rng.choice(("What color is the {}?", "What colour is the {}?", "What is the color of the {}?"))
    return Question(text.format(figure.kind), ((figure.colour,),), wrong)


def place_question(scene: Scene, rng: random.Random) -> Question:
    """Where one of the shapes is, in the picture or beside another."""
    first, *others = rng.sample(scene.figures, len(scene.figures))
    if others and rng.random() < 0.5:
        gaps = [abs(a - b) for a, b in zip(first.centre, others[0].centre, strict=True)]
        axis = gaps.index(max(gaps))
        words = (("left", "right"), ("above", "below"))[axis]
        right = words[first.centre[axis] > others[0].centre[axis]]
        asked = f"{words[0]} or {words[1]} of" if axis == 0 else f"{words[0]} or {words[1]}"
        wrong = tuple(word for word in words if word != right)
        return Question(f"Is the {first.kind} {asked} the {others[0].kind}?", ((right,),), wrong)
    column, row = COLUMNS[int(first.centre[0] * 3)], ROWS[int(first.centre[1] * 3)]
    needed = tuple((word,) for word in (column, row) if word != "middle") or (("middle", "center", "centre"),)
    sides = {"left", "right", "top", "bottom"}
    return Question(f"Where is the {first.kind}?", needed, tuple(sorted(sides - {column, row})))


def digit_question(scene: Scene, rng: random.Random) -> Question:
    """Which digit a scene shows."""
    (figure,) = scene.figures
    text = rng.choice(("What digit is shown?", "Which digit is in the picture?"))
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    wrong = tuple(digit for digit in DIGITS if digit != figure.kind)
    return Question(text, ((figure.kind, words[int(figure.kind)]),), wrong)


def _star(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    angle = (np.arctan2(x, -y)) % (2 * np.pi / 5)
    angle = np.minimum(angle, 2 * np.pi / 5 - angle)
    inner = 0.42
    px, py = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    qx, qy = inner * np.cos(np.pi / 5), inner * np.sin(np.pi / 5)
    return (px - 1) * qy - py * (qx - 1) <= 0


def _inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Membership in a shape of outer radius 1 around the origin, y down."""
    if shape == "circle":
        return np.hypot(x, y) <= 1
    if shape == "square":
        return (np.abs(x) <= 0.8) & (np.abs(y) <= 0.8)
    if shape == "triangle":
        return (y <= 0.7) & (np.abs(x) <= (y + 1) * 0.55)
    if shape == "cross":
        return ((np.abs(x) <= 0.28) & (np.abs(y) <= 0.95)) | ((np.abs(y) <= 0.28) & (np.abs(x) <= 0.95))
    return _star(x, y)


#: Strokes from point to point in a box from -0.5 to 0.5 across and -1 to 1 down; two ways to write each digit.
_CURVES = {
    "0": ["o 0 0 .5 1 0 360", "o 0 0 .42 .95 0 360"],
    "1": ["l -.3 -.6 .1 -1 .1 1", "l 0 -1 0 1"],
    "2": ["o 0 -.5 .5 .5 180 400 l .38 -.17 -.5 1 .5 1", "l -.5 -1 .5 -1 .5 0 -.5 0 -.5 1 .5 1"],
    "3": ["o 0 -.5 .45 .5 200 450 o 0 .5 .5 .5 270 520", "l -.5 -1 .5 -1 .5 1 -.5 1 l -.5 0 .5 0"],
    "4": ["l .2 1 .2 -1 -.5 .4 .5 .4", "l -.5 -1 -.5 0 .5 0 l .5 -1 .5 1"],
    "5": ["l .45 -1 -.4 -1 -.45 -.1 o 0 .35 .5 .65 222 500", "l .5 -1 -.5 -1 -.5 0 .5 0 .5 1 -.5 1"],
    "6": ["o 0 .45 .48 .55 0 360 o .4 .45 .88 1.45 180 262", "l .5 -1 -.5 -1 -.5 1 .5 1 .5 0 -.5 0"],
    "7": ["l -.5 -1 .5 -1 -.1 1", "l -.5 -1 .5 -1 .5 1"],
    "8": ["o 0 -.5 .42 .5 0 360 o 0 .5 .5 .5 0 360", "l -.5 -1 .5 -1 .5 1 -.5 1 -.5 -1 l -.5 0 .5 0"],
    "9": ["o 0 -.45 .48 .55 0 360 o -.4 -.45 .88 1.45 0 82", "l .5 0 -.5 0 -.5 -1 .5 -1 .5 1 -.5 1"],
}


def _segments(curves: str) -> list[tuple[float, float, float, float]]:
    """Straight pieces (x0, y0, x1, y1) of lines ("l x y ...") and arcs ("o x y width height from to")."""
    pieces = []
    for part in re.findall(r"[lo][^lo]*", curves):
        numbers = [float(word) for word in part[1:].split()]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        if part[0] == "o":
            x, y, width, height, start, end = numbers
            angles = np.radians(np.linspace(start, end, 20))
            points = [(x + width * float(np.cos(a)), y + height * float(np.sin(a))) for a in angles]
        pieces += [(*a, *b) for a, b in itertools.pairwise(points)]
    return pieces


def _digit(digit: str, variant: int, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Within half a pen's width of a stroke."""
    pen = (0.15, 0.2)[variant]
    inside = np.zeros(x.shape, np.bool_)
    for x0, y0, x1, y1 in _segments(_CURVES[digit][variant]):
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
        inside |= np.hypot(x - x0 - along * dx, y - y0 - along * dy) <= pen
    return inside


def render(scene: Scene) -> Image.Image:
    """Draw; four samples a pixel and axis when smooth, one otherwise."""
    samples = scene.size * (4 if scene.smooth else 1)
    axis = (np.arange(samples) + 0.5) / samples
    pixels = np.array(COLOURS[scene.background][1 - scene.variant], dtype=np.float64)[None, None]
    for figure in scene.figures:
        x, y = np.meshgrid(*((axis - middle) / figure.radius for middle in figure.centre))
        is_digit = figure.kind in DIGITS
        mask = _digit(figure.kind, scene.variant, x, y) if is_digit else _inside(figure.kind, x, y)
        factor = samples // scene.size
        cover = mask.astype(np.float64).reshape(scene.size, factor, scene.size, factor).mean(axis=(1, 3))[..., None]
        pixels = cover * np.array(COLOURS[figure.colour][scene.variant], dtype=np.float64) + (1 - cover) * pixels
    return Image.fromarray(pixels.round().astype(np.uint8))


def data_url(image: Image.Image, file_format: str = "PNG") -> str:
    """The image as a data URL (JPEG at quality 85)."""
    buffer = io.BytesIO()
    image.save(buffer, file_format, quality=85)
    return f"data:image/{file_format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture_message(url: str, text: str = "Describe the picture.") -> dict[str, object]:
    """A user message with a text part and a picture part."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}],
    }
