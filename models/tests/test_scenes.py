import random

import pytest

from fleet_models.colours import COLOURS, random_rgb
from fleet_models.drawing import random_drawing, render, render_random
from fleet_models.scenes import DIGITS, SHAPES, Item, Scene, place_of, random_scene


def item(kind: str, colour: str, x: float = 0.5, y: float = 0.5, size: float = 0.3) -> Item:
    return Item(kind, colour, x, y, size)


def test_caption_names_every_item_its_colour_and_the_background():
    one = Scene((item("star", "orange"),), "white")
    two = Scene((item("circle", "red"), item("cross", "blue")), "black")
    three = Scene((item("circle", "red"), item("cross", "blue"), item("square", "green")), "black")

    assert one.caption == "The picture shows an orange star on a white background."
    assert two.caption == "The picture shows a red circle and a blue cross on a black background."
    assert three.caption == "The picture shows a red circle, a blue cross and a green square on a black background."
    assert Scene((item("7", "red"),), "blue").caption == "The picture shows a red digit 7 on a blue background."


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (0.2, 0.2, "at the top left"),
        (0.8, 0.5, "on the right"),
        (0.5, 0.8, "at the bottom"),
        (0.5, 0.5, "in the middle, at the center of the picture"),
    ],
)
def test_places_have_plain_names(x, y, words):
    assert place_of(item("circle", "red", x, y)) == words


def test_scenes_hold_one_to_three_shapes_apart_from_one_another_or_one_digit():
    rng = random.Random(5)
    scenes = [random_scene(rng) for _ in range(400)]

    assert {len(scene.items) for scene in scenes} == {1, 2, 3}
    assert {i.kind for scene in scenes for i in scene.items} == {*SHAPES, *DIGITS}
    for scene in scenes:
        assert all(i.colour != scene.background for i in scene.items)
        assert [i.x for i in scene.items] == sorted(i.x for i in scene.items)
        assert len(scene.items) == 1 or not any(i.is_digit for i in scene.items)
        for first in scene.items:
            for second in scene.items:
                gap = max(abs(first.x - second.x), abs(first.y - second.y))
                assert first is second or gap > (first.size + second.size) / 2


def test_same_seed_draws_the_same_picture():
    first_scene, first = render_random(random.Random(7))
    second_scene, second = render_random(random.Random(7))

    assert first_scene == second_scene
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("kind", [*SHAPES, *DIGITS])
def test_an_item_is_where_its_mask_says_and_leaves_background(kind):
    rng = random.Random(3)

    for _ in range(6):
        scene = Scene((item(kind, "white", 0.3, 0.6, 0.5),), "black")
        image, (mask,) = render(scene, random_drawing(scene, rng), rng)
        box = mask.getbbox()
        assert mask.size == image.size
        assert (box[0] + box[2]) / 2 == pytest.approx(0.3 * image.width, abs=0.06 * max(image.size))
        assert (box[1] + box[3]) / 2 == pytest.approx(0.6 * image.height, abs=0.06 * max(image.size))
        histogram = image.convert("L").histogram()
        assert sum(histogram[150:]) > 0.008 * image.width * image.height
        assert sum(histogram[:100]) > 0.05 * image.width * image.height


def test_pictures_vary_in_size_and_compression():
    rng = random.Random(0)
    scene = Scene((item("cross", "red"),), "blue")
    drawings = [random_drawing(scene, rng) for _ in range(300)]

    assert {max(drawing.canvas_px) for drawing in drawings} >= {64, 512}
    assert {drawing.jpeg_quality for drawing in drawings} >= {None, 40, 95}
    assert any(drawing.canvas_px[0] != drawing.canvas_px[1] for drawing in drawings)


@pytest.mark.parametrize("name", COLOURS)
def test_colour_values_are_bytes(name):
    rng = random.Random(1)

    for _ in range(200):
        assert all(0 <= level <= 255 for level in random_rgb(name, rng))
