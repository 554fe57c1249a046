import random

import pytest

from fleet_models.colours import COLOURS
from fleet_models.image_prompts import SYNONYMS, compose, fact_classes, plain_prompt, with_article
from fleet_models.one_shape import OneShape, random_one_shape
from fleet_models.scenes import SHAPES


def words_for(name: str) -> set[str]:
    return set(SYNONYMS.get(name, (name,)))


def test_plain_prompt_is_the_measured_wording():
    assert plain_prompt(OneShape("star", "green", "yellow")) == "a green star on a yellow background"
    assert plain_prompt(OneShape("cross", "orange", "orange")) == "an orange cross on an orange background"
    assert with_article("orange star") == "an orange star"


def test_a_prompt_names_what_it_tells_and_nothing_it_leaves_open():
    rng = random.Random(0)
    for _ in range(3_000):
        scene = random_one_shape(rng)
        prompt, facts = compose(scene, rng)
        told = {facts.shape, facts.colour, facts.background} - {""}

        assert told <= {scene.shape, scene.colour, scene.background}
        for name in told:
            parts = [word.split() for word in words_for(name)]  # a meaningless word may stand between two of them
            assert any(all(part in prompt.lower() for part in word) for word in parts), (prompt, facts)
        for name in {*COLOURS, *SHAPES} - told:
            assert not any(f" {word} " in f" {prompt.lower()} " for word in words_for(name)), (prompt, facts)


def test_most_prompts_tell_everything_and_some_tell_nothing():
    rng = random.Random(1)
    facts = [compose(random_one_shape(rng), rng)[1] for _ in range(2_000)]

    assert sum("" not in (f.shape, f.colour, f.background) for f in facts) > 1_500
    assert sum(f == OneShape("", "", "") for f in facts) > 20


@pytest.mark.parametrize("seed", [3, 4])
def test_prompts_depend_on_the_seed_alone(seed):
    scene = OneShape("circle", "red", "blue")

    assert compose(scene, random.Random(seed)) == compose(scene, random.Random(seed))


def test_classes_have_one_more_for_what_is_not_told():
    assert fact_classes([OneShape("circle", "red", "green"), OneShape("", "white", "")]) == [(0, 0, 1), (5, 7, 8)]
