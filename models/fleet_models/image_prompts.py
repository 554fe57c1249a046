"""Prompts for the image model: one scene said in many ways, some of it left out, and words that mean nothing."""

import random
from collections.abc import Sequence

from fleet_models.colours import COLOURS
from fleet_models.one_shape import OneShape
from fleet_models.scenes import SHAPES

# How much of a scene a prompt tells; the model chooses the rest.
TOLD_WEIGHTS = {"all": 0.86, "no background": 0.06, "shape only": 0.03, "colour only": 0.02, "nothing": 0.03}
SYNONYMS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "circle", "round circle", "disc", "ball"),
    "square": ("square", "square", "square", "box"),
    "triangle": ("triangle",),
    "star": ("star", "star", "star", "five-pointed star"),
    "cross": ("cross", "cross", "cross", "plus sign"),
    "purple": ("purple", "purple", "purple", "violet"),
}
ADJECTIVES = (
    "simple", "bright", "big", "large", "small", "flat", "clean", "bold", "vivid", "plain", "solid", "single", "nice",
    "beautiful", "geometric", "colourful", "perfect", "lovely", "deep", "pure", "sharp", "minimal", "elegant",
)  # fmt: skip
OPENINGS = (
    "", "", "", "", "", "", "draw ", "paint ", "show me ", "please draw ", "make ", "create ", "generate ", "render ",
    "a picture of ", "an image of ", "a drawing of ", "a painting of ", "an illustration of ", "a photo of ",
    "a picture showing ", "the picture shows ", "this image shows ", "i want ", "can you draw ", "give me ",
    "draw a picture of ", "generate an image of ", "a flat illustration of ", "there is ",
)  # fmt: skip
CLOSINGS = (
    "", "", "", "", ".", ".", "!", ", please", " please.", ", flat design", ", minimal style", ", vector art",
    ", simple", ", high quality", " in the centre", " in the middle", ", clean edges", ", digital art", " for me",
    ", geometric illustration.", ", centered composition.",
)  # fmt: skip
WITH_BACKGROUND = (
    "{shape} on {a_background} background",
    "{shape} on {a_background} background",
    "{shape} on {a_background} background",
    "{shape} on {background}",
    "{shape} on {a_background} surface",
    "{shape} on {a_background} canvas",
    "{shape} against {a_background} background",
    "{shape} against {a_background} backdrop",
    "{shape} in front of {a_background} background",
    "{shape} with {a_background} background",
    "{shape} over {a_background} background",
    "{shape}, {background} background",
    "{shape}; background: {background}",
    "{shape} and the background is {background}",
    "{shape}, the background should be {background}",
    "{a_background} background with {shape}",
    "{a_background} background and {shape} on it",
    "on {a_background} background, {shape}",
    "{a_background} picture with {shape} in it",
)
WITHOUT_BACKGROUND = ("{shape}", "{shape}", "{shape} in the middle", "just {shape}")
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvw", "aeiou"


def compose(scene: OneShape, rng: random.Random) -> tuple[str, OneShape]:
    """Say a scene in one of many ways.

    Returns:
        The prompt, and what it tells: a OneShape with "" for every word that the prompt leaves open.
    """
    told = rng.choices(list(TOLD_WEIGHTS), list(TOLD_WEIGHTS.values()))[0]
    if told == "nothing":
        return rng.choice(("", "", "a picture", "draw something", _gibberish(rng))), OneShape("", "", "")
    if told == "colour only":
        return rng.choice(OPENINGS) + f"something {_word(scene.colour, rng)}", OneShape("", scene.colour, "")
    facts = {
        "all": scene,
        "no background": OneShape(scene.shape, scene.colour, ""),
        "shape only": OneShape(scene.shape, "", ""),
    }[told]
    sentence = _sentence(facts, rng)
    opening = rng.choice(OPENINGS)
    prompt = opening + sentence + rng.choice(CLOSINGS)
    if rng.random() < 0.12:
        words = prompt.split(" ")
        words.insert(rng.randint(0, len(words)), _gibberish(rng))
        prompt = " ".join(words)
    return rng.choice((prompt, prompt, prompt.capitalize())), facts


def _sentence(facts: OneShape, rng: random.Random) -> str:
    shape = _shape_phrase(facts, rng)
    if not facts.background:
        return rng.choice(WITHOUT_BACKGROUND).format(shape=shape)
    background = _word(facts.background, rng)
    if rng.random() < 0.1:
        background = f"{rng.choice(ADJECTIVES)} {background}"
    a_background = rng.choice((with_article(background), with_article(background), f"the {background}"))
    return rng.choice(WITH_BACKGROUND).format(shape=shape, background=background, a_background=a_background)


def _shape_phrase(facts: OneShape, rng: random.Random) -> str:
    shape = _word(facts.shape, rng)
    if not facts.colour:
        return with_article(shape)
    colour = _word(facts.colour, rng)
    form = rng.random()
    if form < 0.06:
        return f"{with_article(shape)} in {colour}"
    if form < 0.12:
        return f"{with_article(shape)} that is {colour}"
    if form < 0.18:
        return f"{colour} coloured {shape}"
    adjectives = [rng.choice(ADJECTIVES)] if rng.random() < 0.2 else []
    phrase = " ".join([*adjectives, colour, shape])
    return rng.choice((with_article(phrase), with_article(phrase), with_article(phrase), f"one {phrase}", phrase))


def with_article(phrase: str) -> str:
    """`a red circle`, `an orange star`."""
    return f"{'an' if phrase[0] in _VOWELS else 'a'} {phrase}"


def _word(name: str, rng: random.Random) -> str:
    return rng.choice(SYNONYMS.get(name, (name,)))


def _gibberish(rng: random.Random) -> str:
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 4)))


def plain_prompt(scene: OneShape) -> str:
    """The wording that the figures of the model card are measured with."""
    return f"{with_article(scene.colour)} {scene.shape} on {with_article(scene.background)} background"


def fact_classes(facts: Sequence[OneShape]) -> list[tuple[int, int, int]]:
    """Shape, colour and background of each as class numbers; the last class of each means "not told"."""
    shapes, colours = [*SHAPES, ""], [*COLOURS, ""]
    return [(shapes.index(f.shape), colours.index(f.colour), colours.index(f.background)) for f in facts]
