"""Draws scenes in many ways from a seed, with the map of where each item is."""

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet_models.colours import Rgb, random_rgb
from fleet_models.digits import glyph_mask
from fleet_models.scenes import Item, Scene, random_scene

if TYPE_CHECKING:
    from PIL.Image import Image

CANVAS_SIDES_PX = (64, 80, 96, 128, 160, 200, 224, 224, 256, 320, 384, 448, 512)
MIN_ITEM_PX = 14
MAX_WORK_SIDE_PX = 800

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a scene is drawn: canvas [width, height] in px, samples per pixel and axis, compression, noise (0 to 255)."""

    canvas_px: tuple[int, int]
    supersampling: int
    jpeg_quality: int | None
    noise: float
    shading: float


def random_drawing(scene: Scene, rng: random.Random) -> Drawing:
    """Pick a canvas on which the smallest item still has MIN_ITEM_PX, its edges, compression and noise."""
    smallest = min(item.size for item in scene.items)
    sides = [side for side in CANVAS_SIDES_PX if side * smallest >= MIN_ITEM_PX] or [CANVAS_SIDES_PX[-1]]
    side = rng.choice(sides)
    aspect = rng.choice((1.0,) * 6 + (4 / 3, rng.uniform(0.7, 1.45)))
    canvas = (round(side * aspect), side) if aspect >= 1 else (side, round(side / aspect))
    return Drawing(
        canvas_px=canvas,
        supersampling=rng.choice((1, 1, 2, 3) if max(canvas) * 3 <= MAX_WORK_SIDE_PX else (1, 1, 2)),
        jpeg_quality=rng.choice((None, None, None, 95, 85, 75, 60, 40)),
        noise=rng.choice((0.0,) * 8 + (rng.uniform(2, 14),)),
        shading=rng.choice((0.0,) * 8 + (rng.uniform(0.02, 0.12),)),
    )


def render(scene: Scene, drawing: Drawing, rng: random.Random) -> tuple["Image", list["Image"]]:
    """Draw a scene: the RGB picture, and one mask (mode L, of the canvas's size) per item."""
    from PIL import Image

    image = Image.new("RGB", drawing.canvas_px, random_rgb(scene.background, rng))
    image = _shade(image, drawing.shading, rng)
    same_style = random.Random(rng.random())
    masks = []
    for item in scene.items:
        mask = _item_mask(item, drawing, random.Random(same_style.random()))
        colour = random_rgb(item.colour, rng)
        if not item.is_digit and rng.random() < 0.08:
            image.paste(_edge_colour(rng), (0, 0), _grown(mask))
        image.paste(colour, (0, 0), mask)
        masks.append(mask)
    if drawing.noise:
        image = _add_noise(image, drawing.noise, rng)
    return (image if drawing.jpeg_quality is None else through_jpeg(image, drawing.jpeg_quality)), masks


def render_random(rng: random.Random) -> tuple[Scene, "Image"]:
    """Draw a random scene in a random way."""
    scene = random_scene(rng)
    return scene, render(scene, random_drawing(scene, rng), rng)[0]


def through_jpeg(image: "Image", quality: int) -> "Image":
    """The picture after JPEG compression."""
    from PIL import Image

    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")


def _item_mask(item: Item, drawing: Drawing, rng: random.Random) -> "Image":
    from PIL import Image, ImageDraw

    factor = drawing.supersampling
    width, height = drawing.canvas_px[0] * factor, drawing.canvas_px[1] * factor
    extent = item.size * min(width, height)
    x, y = item.x * width, item.y * height
    mask = Image.new("L", (width, height))
    if item.is_digit:
        glyph = glyph_mask(item.kind, rng)
        scale = extent / max(glyph.size)
        size = max(1, round(glyph.width * scale)), max(1, round(glyph.height * scale))
        glyph = glyph.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
        if factor == 1 and rng.random() < 0.5:
            glyph = glyph.point(lambda level: 255 if level > 127 else 0)
        mask.paste(glyph, (round(x - size[0] / 2), round(y - size[1] / 2)))
    else:
        pen = ImageDraw.Draw(mask)
        _draw_shape(pen, item.kind, (x, y), extent / 2, rng)
        if rng.random() < 0.04:
            _hollow(pen, item.kind, (x, y), extent / 2, rng)
    return mask.resize(drawing.canvas_px, Image.Resampling.BOX) if factor > 1 else mask


def _draw_shape(pen: object, shape: str, centre: Point, radius: float, rng: random.Random, fill: int = 255) -> None:
    draw: object = pen
    x, y = centre
    if shape == "circle":
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill)  # type: ignore[attr-defined]
        return
    points = _fitted(outline_points(shape, rng), radius)
    draw.polygon([(x + px, y + py) for px, py in points], fill=fill)  # type: ignore[attr-defined]


def _hollow(pen: object, shape: str, centre: Point, radius: float, rng: random.Random) -> None:
    """Cut the inside out; for the shapes whose outline alone still says what they are."""
    if shape in ("circle", "square"):
        _draw_shape(pen, shape, centre, radius * rng.uniform(0.55, 0.75), random.Random(0), fill=0)


def outline_points(shape: str, rng: random.Random) -> Sequence[Point]:
    """The corners of a shape around the origin, in one of the ways people draw it; none for a circle."""
    tilt = rng.choice((0.0, 0.0, rng.uniform(-0.2, 0.2)))
    if shape == "square":
        return turned([(-1, -1), (1, -1), (1, 1), (-1, 1)], tilt)
    if shape == "triangle":
        half = rng.choice((1.0, 1.0, rng.uniform(0.7, 1.3))) * math.sqrt(3) / 2
        corners = [(0.0, -1.0), (half, 0.5), (-half, 0.5)]
        if rng.random() < 0.03:
            corners = [(-1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)]
        return turned(corners, tilt + rng.choice((0.0,) * 7 + (math.pi / 2, math.pi, -math.pi / 2)))
    if shape == "star":
        turn = rng.choice((0.0, 0.0, 0.0, rng.uniform(0, 2 * math.pi)))
        num_tips = rng.choice((5,) * 30 + (4, 6))
        radii = [1.0, rng.choice((0.382, 0.4, 0.45, 0.5, rng.uniform(0.32, 0.56)))] * num_tips
        return turned(polar(radii, -math.pi / 2), turn)
    if shape == "cross":
        diagonal = rng.choice((0.0,) * 6 + (math.pi / 4,))
        return turned(cross(rng.choice((1 / 3, 0.3, 0.25, rng.uniform(0.14, 0.42)))), tilt + diagonal)
    return []


def _fitted(points: Sequence[Point], radius: float) -> list[Point]:
    """Scaled to an extent of twice the radius, the middle of the extent at the origin."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x0, y0 = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    scale = 2 * radius / max(max(xs) - min(xs), max(ys) - min(ys))
    return [((x - x0) * scale, (y - y0) * scale) for x, y in points]


def turned(points: Sequence[Point], angle: float) -> list[Point]:
    """Corners turned around the origin by an angle in radians."""
    sin, cos = math.sin(angle), math.cos(angle)
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def polar(radii: Sequence[float], start: float) -> list[Point]:
    """Corners at these distances from the origin, evenly around it, the first at the angle `start`."""
    step = 2 * math.pi / len(radii)
    return [(r * math.cos(start + i * step), r * math.sin(start + i * step)) for i, r in enumerate(radii)]


def cross(arm_ratio: float) -> list[Point]:
    """An upright cross in a box of 2 by 2; `arm_ratio` is half the width of its arms."""
    a = arm_ratio
    right = [(a, -1.0), (a, -a), (1.0, -a), (1.0, a), (a, a), (a, 1.0)]
    return right + [(-x, -y) for x, y in right]


def _grown(mask: "Image") -> "Image":
    from PIL import ImageFilter

    return mask.filter(ImageFilter.MaxFilter(5 if min(mask.size) > 200 else 3))


def _edge_colour(rng: random.Random) -> Rgb:
    level = rng.choice((0, 0, 60, 128, 255))
    return level, level, level


def _shade(image: "Image", strength: float, rng: random.Random) -> "Image":
    """A soft gradient from one side to the other."""
    from PIL import Image

    if not strength:
        return image
    gradient = Image.linear_gradient("L").resize(image.size)
    if rng.random() < 0.5:
        gradient = gradient.transpose(Image.Transpose.ROTATE_90).resize(image.size)
    target = Image.new("RGB", image.size, rng.choice(((0, 0, 0), (255, 255, 255))))
    return Image.composite(target, image, gradient.point(lambda level: int(level * strength)))


def _add_noise(image: "Image", strength: float, rng: random.Random) -> "Image":
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, strength, (image.height, image.width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
