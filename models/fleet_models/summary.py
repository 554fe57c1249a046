"""What the language model reads in place of a picture: a fixed form of one-token words, filled in from the scene.

    two shapes first red circle left top upper second blue square right middle lower third none ... white background

Every word has its own place, whatever the picture, so the tower learns one small choice per image token.
"""

import random
from collections.abc import Sequence

from fleet_models.colours import COLOURS
from fleet_models.scenes import COUNT_WORDS, KINDS, MAX_ITEMS, TIE_DISTANCE, Item, Scene
from fleet_models.tower import NUM_IMAGE_TOKENS

SLOT_NAMES = (" first", " second", " third")
COLUMNS = (" left", " middle", " right")
ROWS = (" top", " middle", " bottom")
HEIGHTS = (" upper", " central", " lower")
NONE = " none"
PADDING = "\n"
# Places of a slot's words after its name.
COLOUR, KIND, COLUMN, ROW, HEIGHT = range(5)
WORDS_PER_SLOT = 5
COUNT_AT = 0
SLOT_AT = tuple(2 + (WORDS_PER_SLOT + 1) * slot + 1 for slot in range(MAX_ITEMS))
BACKGROUND_AT = 2 + (WORDS_PER_SLOT + 1) * MAX_ITEMS
NUM_WORDS = BACKGROUND_AT + 2


def summary_words(scene: Scene, rng: random.Random | None = None) -> list[str]:
    """The form for a scene, NUM_IMAGE_TOKENS words long.

    With `rng`, items whose order from left to right nobody could tell may change places, as the tower may put them.
    """
    items = list(scene.items)
    if rng is not None:
        for i in range(len(items) - 1):
            if items[i + 1].x - items[i].x < TIE_DISTANCE and rng.random() < 0.5:
                items[i], items[i + 1] = items[i + 1], items[i]
    words = [f" {COUNT_WORDS[len(items)]}", " shapes"]
    for slot, name in enumerate(SLOT_NAMES):
        words.append(name)
        words += slot_words(items[slot], items) if slot < len(items) else [NONE] * WORDS_PER_SLOT
    words += [f" {scene.background}", " background"]
    return words + [PADDING] * (NUM_IMAGE_TOKENS - len(words))


def slot_words(item: Item, items: Sequence[Item]) -> list[str]:
    """Colour, kind, column, row, and height among the others."""
    rank = sum(other.y < item.y for other in items)
    height = HEIGHTS[2 if rank and rank == len(items) - 1 else rank]
    kind = item.kind if item.is_digit else f" {item.kind}"
    return [f" {item.colour}", kind, f" {item.column}", f" {item.row}", height]


def all_words() -> list[str]:
    """Every word that a form may hold, each once, in a fixed order."""
    words = [f" {word}" for word in COUNT_WORDS[1:]] + [" shapes", *SLOT_NAMES]
    words += [f" {colour}" for colour in COLOURS] + [f" {k}" if k.isalpha() else k for k in KINDS]
    words += [*COLUMNS, *ROWS, *HEIGHTS, NONE, " background", PADDING]
    return list(dict.fromkeys(words))
