"""The judge of generated pictures is right about true renders and refuses what is no clear shape."""

import random

import numpy as np
import pytest

from fleet_models.image_judge import judge, nearest_colour
from fleet_models.image_scenes import PALETTE, narrow_drawing, render_scenes
from fleet_models.one_shape import OneShape, draw_one_shape, random_one_shape
from fleet_models.scenes import SHAPES
from tests.support import scenes


@pytest.mark.parametrize("shape", SHAPES)
def test_true_renders_are_recognised(shape):
    rng = random.Random(shape)
    for _ in range(12):
        other = random_one_shape(rng)
        scene = OneShape(shape, other.colour, other.background)
        verdict = judge(np.asarray(draw_one_shape(scene, narrow_drawing(scene, rng))))

        assert verdict.agrees_with(scene), verdict


def test_pictures_of_another_renderer_are_recognised():
    rng = random.Random(11)
    drawn = [scenes.random_scene(rng) for _ in range(40)]
    right = []
    for scene in drawn:
        figure = scene.figures[0]
        wanted = OneShape(figure.kind, figure.colour, scene.background)
        right.append(judge(np.asarray(scenes.render(scene))).seen == wanted)

    assert sum(right) >= 32  # it draws triangles of other proportions, some very small


def test_a_blob_is_no_shape():
    y, x = np.mgrid[:64, :64] - 31.5
    blob = np.hypot(x, y) < 14 + 5 * np.sin(3 * np.arctan2(y, x) + 1)
    pixels = np.where(blob[..., None], PALETTE["red"], PALETTE["white"]).astype(np.uint8)
    verdict = judge(pixels)

    assert (verdict.seen.colour, verdict.seen.background) == ("red", "white")
    assert not any(
        verdict.agrees_with(OneShape(shape, "red", "white")) for shape in ("circle", "square", "cross", "star")
    )


def test_a_wrong_colour_shape_or_background_is_refused():
    scene = OneShape("square", "blue", "white")
    verdict = judge(np.asarray(draw_one_shape(scene, narrow_drawing(scene, random.Random(0)))))

    assert verdict.agrees_with(scene)
    for wanted in (
        OneShape("circle", "blue", "white"),
        OneShape("square", "red", "white"),
        OneShape("square", "blue", "black"),
    ):
        assert not verdict.agrees_with(wanted)


def test_an_empty_picture_is_named_by_its_background():
    verdict = judge(np.full((64, 64, 3), PALETTE["green"], np.uint8))

    assert (verdict.seen.shape, verdict.seen.background, verdict.overlap) == ("", "green", 0.0)


@pytest.mark.parametrize("name", PALETTE)
def test_every_colour_of_the_palette_has_its_own_name(name):
    assert nearest_colour(PALETTE[name]) == name


def test_rendered_scenes_depend_on_the_seed_alone():
    first, second = render_scenes(30, 5, 1), render_scenes(30, 5, 2)

    assert first[0] == second[0]
    assert np.array_equal(first[1], second[1])
    assert not np.array_equal(first[1], render_scenes(30, 6, 1)[1])
