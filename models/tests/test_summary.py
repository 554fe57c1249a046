import random
import re

from fleet_models.questions import random_pairs
from fleet_models.scenes import Item, Scene, random_scene
from fleet_models.summary import NUM_WORDS, SLOT_AT, all_words, summary_words
from fleet_models.tower import NUM_IMAGE_TOKENS

CIRCLE = Item("circle", "red", 0.2, 0.2, 0.3)
SQUARE = Item("square", "blue", 0.8, 0.7, 0.3)


def test_a_summary_is_one_form_filled_in_from_left_to_right():
    words = summary_words(Scene((CIRCLE, SQUARE), "white"))

    assert "".join(words[:NUM_WORDS]) == (
        " two shapes first red circle left top upper second blue square right bottom lower"
        " third none none none none none white background"
    )
    assert set(words[NUM_WORDS:]) == {"\n"}
    assert len(words) == NUM_IMAGE_TOKENS


def test_every_word_of_any_summary_is_known():
    rng = random.Random(2)
    known = set(all_words())

    assert all(set(summary_words(random_scene(rng), rng)) <= known for _ in range(300))


def test_items_without_an_order_may_change_places():
    below = Item("star", "green", 0.22, 0.8, 0.3)
    scene = Scene((CIRCLE, below), "white")
    first = {summary_words(scene, random.Random(seed))[SLOT_AT[0] + 1] for seed in range(20)}

    assert first == {" circle", " star"}


def test_answers_about_two_shapes_are_true():
    rng = random.Random(4)
    scene = Scene((CIRCLE, SQUARE), "white")
    pairs = random_pairs(scene, rng, 600)
    answers = dict(pairs)

    assert answers["How many shapes are there?"] == "There are 2 (two) shapes."
    assert answers["What color is the circle?"] == "The circle is red."
    assert answers["Where is the square?"] == "The square is at the bottom right."
    assert answers["What color is the background?"] == "The background is white."
    assert answers["Describe the picture."] == scene.caption
    sides = [a for q, a in pairs if re.match(r"Is the circle (left|right) or", q)]
    assert sides and all(re.fullmatch("The circle is to the left of the( blue)? square.", side) for side in sides)


def test_a_digit_is_read():
    rng = random.Random(4)
    answers = dict(random_pairs(Scene((Item("7", "red", 0.5, 0.5, 0.6),), "white"), rng, 200))

    assert answers["What digit is shown?"] == "The digit is 7."
    assert answers["Which digit is in the picture?"] == "The digit is 7."
