"""Questions about a scene in the words people use, with their answers."""

import random
from collections.abc import Callable, Sequence

from fleet_models.scenes import (
    COUNT_WORDS,
    SHAPES,
    TIE_DISTANCE,
    Item,
    Scene,
    article,
    enumerate_words,
    name_of,
    place_of,
)
from fleet_models.smollm2 import SYSTEM_PROMPT

Pair = tuple[str, str]

DESCRIBE = (
    "Describe the picture.",
    "Describe the picture.",
    "Describe the picture.",
    "Describe this picture.",
    "Describe the image.",
    "Describe this image.",
    "Describe what you see.",
    "Describe the image in one sentence.",
    "Describe the scene.",
    "Please describe what you see.",
    "Please describe the image.",
    "What is in the picture?",
    "What is in this picture?",
    "What is in this image?",
    "What's in this image?",
    "What does the picture show?",
    "What does this image show?",
    "What do you see?",
    "What can you see in the picture?",
    "What is shown here?",
    "What is this?",
    "Tell me about this picture.",
    "Caption this image.",
    "Write a caption.",
    "Look at the picture. What is it?",
    "What shapes are in the picture?",
    "Which shapes do you see?",
    "Name the shapes and their colors.",
    "List the shapes in the picture.",
    "",
)
DESCRIBE_ONE = (
    "What shape is in the picture?",
    "What shape is it?",
    "Which shape is shown in the image?",
    "What shape do you see?",
    "Name the shape in the picture.",
    "Name the shape, its colour and the background.",
    "What shape is in the picture and what color is it?",
    "Which colours do you see?",
)
COUNT = (
    "How many shapes are there?",
    "How many shapes are there?",
    "How many shapes are in the picture?",
    "How many shapes are in the image?",
    "How many shapes do you see?",
    "How many shapes can you see?",
    "How many objects are there?",
    "How many objects are in the picture?",
    "How many figures are shown?",
    "Count the shapes.",
    "Count the shapes in the picture.",
    "What is the number of shapes?",
)
COLOUR = (
    "What color is the {0}?",
    "What color is the {0}?",
    "What colour is the {0}?",
    "Which color is the {0}?",
    "Which colour does the {0} have?",
    "What is the color of the {0}?",
    "What is the {0}'s color?",
    "Tell me the color of the {0}.",
    "The {0} is what color?",
)
PLACE = (
    "Where is the {0}?",
    "Where is the {0}?",
    "Where is the {0} in the picture?",
    "Where in the image is the {0}?",
    "Where can I find the {0}?",
    "What is the position of the {0}?",
    "In which part of the picture is the {0}?",
    "Which part of the image is the {0} in?",
    "Locate the {0}.",
)
SIDE = (
    "Is the {0} {1} or {2} of the {3}?",
    "Is the {0} {1} or {2} of the {3}?",
    "Is the {0} to the {1} or to the {2} of the {3}?",
    "Is the {0} on the {1} or on the {2} of the {3}?",
    "Is the {0} on the {1} or {2} side of the {3}?",
)
HEIGHT = (
    "Is the {0} {1} or {2} the {3}?",
    "Is the {0} {1} or {2} the {3}?",
    "Relative to the {3}, is the {0} {1} or {2}?",
)
RELATION = (
    "Where is the {0} relative to the {1}?",
    "Where is the {0} compared to the {1}?",
    "What is the position of the {0} relative to the {1}?",
)
DIGIT = (
    "What digit is shown?",
    "What digit is shown?",
    "Which digit is in the picture?",
    "Which digit is in the picture?",
    "What digit is in the picture?",
    "What digit is this?",
    "Which digit is shown?",
    "Which digit do you see?",
    "What number is shown?",
    "What number is in the picture?",
    "What number is this?",
    "Which number do you see?",
    "Read the digit.",
    "What is the digit?",
)
BACKGROUND = (
    "What color is the background?",
    "What colour is the background?",
    "What is the background color?",
    "What is the color of the background?",
    "Which color is the background?",
)
PAIR_QUESTIONS = (
    "Describe the pictures.",
    "Describe both pictures.",
    "Describe the images.",
    "What is in these pictures?",
    "What do the two images show?",
    "What do you see?",
    "Describe the picture.",
)
SYSTEM_PROMPTS = ("", "", "", SYSTEM_PROMPT, "You are a helpful assistant.", "Answer in one short sentence.")


def random_pairs(scene: Scene, rng: random.Random, num_pairs: int) -> list[Pair]:
    """Questions about a scene, each kind that fits it at least about as often as the others, and the answers."""
    fitting = [maker for maker in _makers(scene) if maker is not None]
    return [rng.choice(fitting)(scene, rng) for _ in range(num_pairs)]


def _makers(scene: Scene) -> Sequence[Callable[[Scene, random.Random], Pair]]:
    if scene.items[0].is_digit:
        return (_digit, _digit, _digit, _describe, _background, _colour)
    makers = [_describe, _describe, _count, _colour, _place, _background, _yes_no, _count_some, _which, _all_colours]
    return makers + [_colour, _place, _relation, _relation, _relation, _relation, _count] * (len(scene.items) > 1)


def _describe(scene: Scene, rng: random.Random) -> Pair:
    one = len(scene.items) == 1 and not scene.items[0].is_digit and rng.random() < 0.4
    return rng.choice(DESCRIBE_ONE if one else DESCRIBE), scene.caption


def _count(scene: Scene, rng: random.Random) -> Pair:
    count = len(scene.items)
    answer = "There is one shape." if count == 1 else f"There are {COUNT_WORDS[count]} shapes."
    return rng.choice(COUNT), answer.replace(COUNT_WORDS[count], f"{count} ({COUNT_WORDS[count]})")


def _called(scene: Scene, item: Item, rng: random.Random) -> str:
    """A name that means this item alone: its kind, mostly, or with its colour."""
    if item.is_digit:
        return rng.choice(("digit", "number"))
    same_kind = [other for other in scene.items if other.kind == item.kind]
    if len(same_kind) == 1 and rng.random() < 0.8:
        return item.kind
    return f"{item.colour} {item.kind}"


def _colour(scene: Scene, rng: random.Random) -> Pair:
    item = rng.choice(scene.items)
    same_kind = {other.colour for other in scene.items if other.kind == item.kind}
    if item.is_digit:
        return rng.choice(COLOUR).format("digit"), f"The digit is {item.colour}."
    if len(scene.items) == 1 and rng.random() < 0.3:
        return rng.choice(COLOUR).format(rng.choice(("shape", "object"))), f"The {item.kind} is {item.colour}."
    if len(same_kind) > 1:
        return _background(scene, rng)
    return rng.choice(COLOUR).format(item.kind), f"The {item.kind} is {item.colour}."


def _place(scene: Scene, rng: random.Random) -> Pair:
    item = rng.choice(scene.items)
    name = _called(scene, item, rng)
    return rng.choice(PLACE).format(name), f"The {name} is {place_of(item)}."


def _background(scene: Scene, rng: random.Random) -> Pair:
    return rng.choice(BACKGROUND), f"The background is {scene.background}."


def _digit(scene: Scene, rng: random.Random) -> Pair:
    return rng.choice(DIGIT), f"The digit is {scene.items[0].kind}."


def _relation(scene: Scene, rng: random.Random) -> Pair:
    first, second = rng.sample(scene.items, 2)
    name, other = _called(scene, first, rng), _called(scene, second, rng)
    dx, dy = first.x - second.x, first.y - second.y
    if name == other or max(abs(dx), abs(dy)) < 2 * TIE_DISTANCE:
        return _describe(scene, rng)
    side, height = ("right" if dx > 0 else "left"), ("below" if dy > 0 else "above")
    kinds = [kind for kind, gap in (("side", dx), ("height", dy)) if abs(gap) >= 2 * TIE_DISTANCE]
    kind = rng.choice(kinds)
    if rng.random() < 0.2:
        words = [f"to the {side} of"] * ("side" in kinds) + [height] * ("height" in kinds)
        return rng.choice(RELATION).format(name, other), f"The {name} is {' and '.join(words)} the {other}."
    if rng.random() < 0.25:
        asked = rng.choice(("left", "right")) if kind == "side" else rng.choice(("above", "below"))
        right = asked in (side, height)
        phrase = f"to the {asked} of" if kind == "side" else asked
        truth = f"to the {side} of" if kind == "side" else height
        return f"Is the {name} {phrase} the {other}?", f"{'Yes' if right else 'No'}, the {name} is {truth} the {other}."
    pair = ["left", "right"] if kind == "side" else ["above", "below"]
    rng.shuffle(pair)
    if kind == "side":
        return rng.choice(SIDE).format(name, *pair, other), f"The {name} is to the {side} of the {other}."
    return rng.choice(HEIGHT).format(name, *pair, other), f"The {name} is {height} the {other}."


def _yes_no(scene: Scene, rng: random.Random) -> Pair:
    kind = rng.choice([rng.choice(SHAPES), rng.choice(scene.items).kind])
    question = rng.choice(("Is there {0} {1}?", "Is there {0} {1} in the picture?", "Do you see {0} {1}?"))
    there = [item for item in scene.items if item.kind == kind]
    answer = f"Yes, there is {name_of(there[0])}." if there else f"No, there is no {kind}."
    return question.format(article(kind), kind), answer


def _count_some(scene: Scene, rng: random.Random) -> Pair:
    kind = rng.choice([rng.choice(SHAPES), rng.choice(scene.items).kind])
    count = sum(item.kind == kind for item in scene.items)
    many = kind + ("es" if kind == "cross" else "s")
    word = f"{count} ({COUNT_WORDS[count]})"
    answer = f"There is {word} {kind}." if count == 1 else f"There are {word} {many}."
    return rng.choice(("How many {0} are there?", "How many {0} do you see?")).format(many), answer


def _which(scene: Scene, rng: random.Random) -> Pair:
    item = rng.choice(scene.items)
    if len([other for other in scene.items if other.colour == item.colour]) > 1:
        return _describe(scene, rng)
    question = rng.choice(("What shape is {0}?", "Which shape is {0}?", "What is the {0} shape?"))
    return question.format(item.colour), f"The {item.colour} shape is {article(item.kind)} {item.kind}."


def _all_colours(scene: Scene, rng: random.Random) -> Pair:
    names = [f"the {item.kind} is {item.colour}" for item in scene.items]
    text = enumerate_words([*names, f"the background is {scene.background}"])
    question = rng.choice(("What colors do you see?", "Which colors are in the picture?", "What colors are used?"))
    return question, text[0].upper() + text[1:] + "."
