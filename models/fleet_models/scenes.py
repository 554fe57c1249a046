"""Scenes: one to three coloured shapes, or one digit, on a background of another colour; what is true of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_models.colours import COLOURS

SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = tuple("0123456789")
KINDS = SHAPES + DIGITS
COUNT_WORDS = ("zero", "one", "two", "three")
MAX_ITEMS = 3
# Where left ends and the middle begins: between halves and thirds, so that either reading comes out right.
NEAR_EDGE, FAR_EDGE = 0.37, 0.63
# Items closer than this along an axis have no order along it that anybody could ask for.
TIE_DISTANCE = 0.07


@dataclass(frozen=True, slots=True)
class Item:
    """One shape or digit.

    `x`, `y`: its middle, in parts of the picture's width and height; `size`: its extent, in parts of the shorter side.
    """

    kind: str
    colour: str
    x: float
    y: float
    size: float

    @property
    def is_digit(self) -> bool:
        """Whether this is a digit rather than a shape."""
        return self.kind in DIGITS

    @property
    def column(self) -> str:
        """left, middle or right."""
        return _third(self.x, ("left", "middle", "right"))

    @property
    def row(self) -> str:
        """top, middle or bottom."""
        return _third(self.y, ("top", "middle", "bottom"))


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows: the answer a test knows beforehand. Items come from left to right."""

    items: tuple[Item, ...]
    background: str

    @property
    def caption(self) -> str:
        """The sentence that describes it."""
        names = [name_of(item) for item in self.items]
        return f"The picture shows {enumerate_words(names)} on {article(self.background)} {self.background} background."


def name_of(item: Item) -> str:
    """For example "a red circle" or "an orange digit 7"."""
    what = f"digit {item.kind}" if item.is_digit else item.kind
    return f"{article(item.colour)} {item.colour} {what}"


def place_of(item: Item) -> str:
    """Where an item is, to follow "is"."""
    column, row = item.column, item.row
    if column == row == "middle":
        return "in the middle, at the center of the picture"
    if row == "middle":
        return f"on the {column}"
    if column == "middle":
        return f"at the {row}"
    return f"at the {row} {column}"


def article(word: str) -> str:
    """a or an."""
    return "an" if word[0] in "aeiou" else "a"


def enumerate_words(words: Sequence[str]) -> str:
    """ "x", "x and y", or "x, y and z"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def random_scene(rng: random.Random, *, digits: float = 0.3) -> Scene:
    """One digit in `digits` of the scenes; otherwise one to three shapes that do not touch."""
    background, *colours = rng.sample(COLOURS, len(COLOURS))
    if rng.random() < digits:
        return Scene((_random_digit(rng, colours[0]),), background)
    if rng.random() < 0.25:
        colours = rng.choices(colours, k=MAX_ITEMS)
    num_items = rng.choice((1, 2, 2, 3, 3, 3))
    kinds = rng.choices(SHAPES, k=num_items) if rng.random() < 0.35 else rng.sample(SHAPES, num_items)
    while True:
        places = _LAYOUTS[rng.randrange(len(_LAYOUTS))](rng, num_items)
        if _apart(places):
            break
    items = [Item(kind, colour, *place) for kind, colour, place in zip(kinds, colours, places, strict=False)]
    return Scene(tuple(sorted(items, key=lambda item: item.x)), background)


Place = tuple[float, float, float]


def _random_digit(rng: random.Random, colour: str) -> Item:
    size = rng.uniform(0.3, 0.95)
    x, y = _free_place(rng, size)
    if rng.random() < 0.6:
        x, y = 0.5 + (x - 0.5) * 0.3, 0.5 + (y - 0.5) * 0.3
    return Item(rng.choice(DIGITS), colour, x, y, size)


def _sizes(rng: random.Random, num_items: int, low: float, high: float) -> list[float]:
    if rng.random() < 0.5:
        return [rng.uniform(low, high)] * num_items
    return [rng.uniform(low, high) for _ in range(num_items)]


def _free_place(rng: random.Random, size: float) -> tuple[float, float]:
    slack = max(0.02, (0.98 - size) / 2)
    return 0.5 + rng.uniform(-slack, slack), 0.5 + rng.uniform(-slack, slack)


def _anywhere(rng: random.Random, num_items: int) -> list[Place]:
    low, high = ((0.2, 0.86), (0.18, 0.5), (0.17, 0.42))[num_items - 1]
    return [(*_free_place(rng, size), size) for size in _sizes(rng, num_items, low, high)]


def _grid(rng: random.Random, num_items: int) -> list[Place]:
    """In different cells of a 2 x 2 or 3 x 3 grid, near their middles."""
    side = rng.choice((2, 3, 3))
    cells = rng.sample([(i, j) for i in range(side) for j in range(side)], num_items)
    sizes = _sizes(rng, num_items, 0.55 / side, 0.95 / side)
    loose = rng.choice((0.0, 0.04))
    return [
        ((i + 0.5) / side + rng.uniform(-loose, loose), (j + 0.5) / side + rng.uniform(-loose, loose), size)
        for (i, j), size in zip(cells, sizes, strict=True)
    ]


def _line(rng: random.Random, num_items: int) -> list[Place]:
    """In a row or a column, evenly spaced."""
    sizes = _sizes(rng, num_items, 0.5 / max(num_items, 2), 0.95 / max(num_items, 2))
    loose, across = rng.choice((0.0, 0.03)), rng.choice((0.5, rng.uniform(0.25, 0.75)))
    places = []
    for i, size in enumerate(sizes):
        along = (i + 0.5) / num_items
        places.append((along + rng.uniform(-loose, loose), across + rng.uniform(-loose, loose), size))
    return places if rng.random() < 0.5 else [(y, x, size) for x, y, size in places]


_LAYOUTS = (_anywhere, _anywhere, _grid, _line)


def _apart(places: Sequence[Place]) -> bool:
    """Whether items neither touch one another nor leave the picture."""
    for i, (x, y, size) in enumerate(places):
        if not all(size / 2 - 0.03 <= v <= 1 - size / 2 + 0.03 for v in (x, y)):
            return False
        for other_x, other_y, other_size in places[:i]:
            if max(abs(x - other_x), abs(y - other_y)) < (size + other_size) / 2 + 0.015:
                return False
    return True


def _third(value: float, words: tuple[str, str, str]) -> str:
    return words[0] if value < NEAR_EDGE else words[2] if value > FAR_EDGE else words[1]
