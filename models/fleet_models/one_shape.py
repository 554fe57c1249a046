"""The world of the image model: one coloured shape on a background of another colour, drawn as told."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet_models.colours import COLOURS, Rgb
from fleet_models.drawing import Point, cross, polar, turned
from fleet_models.scenes import SHAPES, article

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class OneShape:
    """What a picture shows, or what a prompt tells of it: "" for what it leaves open."""

    shape: str
    colour: str
    background: str

    @property
    def caption(self) -> str:
        """The sentence that describes it."""
        shape = f"{article(self.colour)} {self.colour} {self.shape}"
        return f"The picture shows {shape} on {article(self.background)} {self.background} background."


@dataclass(frozen=True, slots=True)
class ShapeDrawing:
    """How it is drawn on a square canvas of `side_px`: lengths and places in parts of the side, angles in radians."""

    side_px: int
    colour: Rgb
    background: Rgb
    centre: Point
    diameter: float
    rotation: float
    inner_ratio: float
    arm_ratio: float
    supersampling: int


def random_one_shape(rng: random.Random) -> OneShape:
    """Pick a shape, its colour and another background colour."""
    colour, background = rng.sample(COLOURS, 2)
    return OneShape(rng.choice(SHAPES), colour, background)


def draw_one_shape(what: OneShape, how: ShapeDrawing) -> "Image":
    """Draw it as an RGB picture."""
    from PIL import Image, ImageDraw

    side = how.side_px * how.supersampling
    image = Image.new("RGB", (side, side), how.background)
    pen = ImageDraw.Draw(image)
    x0, y0, radius = how.centre[0] * side, how.centre[1] * side, how.diameter / 2 * side
    if what.shape == "circle":
        pen.ellipse([x0 - radius, y0 - radius, x0 + radius, y0 + radius], fill=how.colour)
    else:
        corners = turned(_corners(what.shape, how), how.rotation)
        pen.polygon([(x0 + radius * x, y0 + radius * y) for x, y in corners], fill=how.colour)
    if how.supersampling > 1:
        image = image.resize((how.side_px, how.side_px), Image.Resampling.BOX)
    return image


def _corners(shape: str, how: ShapeDrawing) -> Sequence[Point]:
    """Around the origin, within a radius of 1 (the square and the cross: within a box of 2 by 2)."""
    if shape == "square":
        return [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    if shape == "triangle":
        return polar([1.0] * 3, -math.pi / 2)
    if shape == "star":
        return polar([1.0, how.inner_ratio] * 5, -math.pi / 2)
    return cross(how.arm_ratio)
