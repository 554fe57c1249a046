"""Batches of pictures with everything the tower is asked about them, and the loss on its image tokens."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_models import summary
from fleet_models.colours import COLOURS
from fleet_models.pictures import MAP_SIDE, NO_COLOUR, NO_KIND, SCENES_PER_CHUNK
from fleet_models.scenes import FAR_EDGE, KINDS, MAX_ITEMS, NEAR_EDGE, TIE_DISTANCE
from fleet_models.tower import IMAGE_SIDE_PX, NUM_IMAGE_TOKENS, PATCH_SIDE_PX, split_patches

_SHARPNESS = 8.0
_PERMUTATIONS = tuple(itertools.permutations(range(MAX_ITEMS)))
_WORD_WEIGHTS = (1.5, 3.0, 1.0, 1.0, 0.7)  # colour, kind, column, row, height
_FIXED_WEIGHT = 0.15
_COUNT_WEIGHT, _BACKGROUND_WEIGHT = 2.0, 1.5
_MIN_PART = 6  # of a patch's 64 map cells: below it, a patch shows nothing


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of a summary: float32 embeddings [size, hidden] and the row of each word."""

    embeddings: Any
    row_of: dict[str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures and what is true of them.

    patches: uint8 [num, patches, 3 * patch * patch]; cells: float32 [num, patches, 64], 1 inside an item;
    part_kinds, part_colours: int64 [num, patches], what most of a patch's items is; slots: int64 [num, MAX_ITEMS, 5],
    the words of each item; orders: bool [num, permutations], which orders of the items are right;
    sure_heights: bool [num]; fixed: int64 [num, tokens], the words outside the slots, -1 inside.
    """

    patches: Any
    cells: Any
    part_kinds: Any
    part_colours: Any
    slots: Any
    orders: Any
    sure_heights: Any
    fixed: Any


def load_vocabulary(language_model: Path) -> Vocabulary:
    """Read the embeddings of all summary words; each must be one token."""
    import torch
    from safetensors import safe_open
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(language_model / "tokenizer.json"))
    words = summary.all_words()
    ids = [tokenizer.encode(word).ids for word in words]
    if any(len(row) != 1 for row in ids):
        raise ValueError(f"not one token each: {[w for w, row in zip(words, ids, strict=True) if len(row) != 1]}")
    with safe_open(language_model / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")[[row[0] for row in ids]].to(torch.float32)
    return Vocabulary(table, {word: i for i, word in enumerate(words)})


def make_batch(chunks: list[Any], chosen: Any, vocabulary: Vocabulary, *, mirror: Any = None) -> Batch:
    """Gather scenes by number over all chunks (every scene of them when `chosen` is None).

    With a generator as `mirror`, half of the scenes without digits are mirrored from left to right.
    """
    import numpy as np
    import torch

    numbers = np.arange(len(chunks) * SCENES_PER_CHUNK) if chosen is None else chosen.numpy()
    picked = {}
    for name in ("pixels", "maps", "kinds", "colours", "places", "backgrounds"):
        rows = [getattr(chunks[n // SCENES_PER_CHUNK], name)[n % SCENES_PER_CHUNK] for n in numbers]
        picked[name] = torch.from_numpy(np.stack(rows))
    if mirror is not None:
        is_digit = picked["kinds"][:, 0] >= NO_KIND - 10
        _mirror(picked, (torch.rand(len(numbers), generator=mirror) < 0.5) & ~is_digit)
    slots, orders, sure = _slot_targets(picked, vocabulary)
    cells, kinds, colours = _part_targets(picked)
    fixed = _fixed_targets(picked, vocabulary)
    return Batch(split_patches(picked["pixels"].permute(0, 3, 1, 2)), cells, kinds, colours, slots, orders, sure, fixed)


def _mirror(picked: dict[str, Any], which: Any) -> None:
    """Flip pictures; the items of a flipped scene keep their numbers, only their places change."""
    picked["pixels"][which] = picked["pixels"][which].flip(2)
    picked["maps"][which] = picked["maps"][which].flip(2)
    picked["places"][which, :, 0] = 1 - picked["places"][which, :, 0]


def _slot_targets(picked: dict[str, Any], vocabulary: Vocabulary) -> tuple[Any, Any, Any]:
    import torch

    row = vocabulary.row_of
    kinds, colours, places = picked["kinds"], picked["colours"], picked["places"]
    absent = kinds == NO_KIND
    none = row[summary.NONE]
    kind_rows = torch.tensor([row[f" {k}" if k.isalpha() else k] for k in KINDS] + [none])[kinds]
    colour_rows = torch.tensor([row[f" {c}"] for c in COLOURS] + [none])[colours]
    thirds = (places > NEAR_EDGE).long() + (places > FAR_EDGE).long()
    column_rows = torch.tensor([row[word] for word in summary.COLUMNS])[thirds[..., 0]]
    row_rows = torch.tensor([row[word] for word in summary.ROWS])[thirds[..., 1]]
    x, y = places[..., 0].masked_fill(absent, 9.0), places[..., 1]
    above = (y[:, None, :] < y[:, :, None]) & ~absent[:, None, :]
    rank, count = above.sum(-1), (~absent).sum(-1, keepdim=True)
    rank = torch.where((rank > 0) & (rank == count - 1), 2, rank)
    height_rows = torch.tensor([row[word] for word in summary.HEIGHTS])[rank]
    words = torch.stack([colour_rows, kind_rows, column_rows, row_rows, height_rows], -1)
    words[absent] = none
    # An order is right when no item stands clearly to the right of one that comes after it.
    orders = []
    for permutation in _PERMUTATIONS:
        placed = x[:, list(permutation)]
        orders.append((placed.cummax(-1).values - placed).amax(-1) < TIE_DISTANCE)
    gaps = (y[:, None, :] - y[:, :, None]).abs() + 9.0 * (absent[:, None, :] | absent[:, :, None])
    gaps = gaps + 9.0 * torch.eye(MAX_ITEMS)
    return words, torch.stack(orders, -1), gaps.amin((1, 2)) > TIE_DISTANCE


def _part_targets(picked: dict[str, Any]) -> tuple[Any, Any, Any]:
    import torch

    grid = IMAGE_SIDE_PX // PATCH_SIDE_PX
    cell = MAP_SIDE // grid
    maps = picked["maps"].long()
    maps = maps.view(-1, grid, cell, grid, cell).transpose(2, 3).reshape(-1, grid * grid, cell * cell)
    areas = torch.stack([(maps == item + 1).sum(-1) for item in range(MAX_ITEMS)], -1)
    most = areas.argmax(-1)
    shows = areas.sum(-1) >= _MIN_PART
    kinds = torch.where(shows, picked["kinds"].gather(1, most), NO_KIND)
    colours = torch.where(shows, picked["colours"].gather(1, most), NO_COLOUR)
    return (maps > 0).float(), kinds, colours


def _fixed_targets(picked: dict[str, Any], vocabulary: Vocabulary) -> Any:
    import torch

    row = vocabulary.row_of
    fixed = torch.full((len(picked["kinds"]), NUM_IMAGE_TOKENS), row[summary.PADDING])
    count = (picked["kinds"] != NO_KIND).sum(-1)
    fixed[:, summary.COUNT_AT] = torch.tensor([row[f" {w}"] for w in ("one", "two", "three")])[count - 1]
    fixed[:, summary.COUNT_AT + 1] = row[" shapes"]
    for slot, name in enumerate(summary.SLOT_NAMES):
        fixed[:, summary.SLOT_AT[slot] - 1] = row[name]
        fixed[:, summary.SLOT_AT[slot] : summary.SLOT_AT[slot] + summary.WORDS_PER_SLOT] = -1
    fixed[:, summary.BACKGROUND_AT] = torch.tensor([row[f" {c}"] for c in COLOURS])[picked["backgrounds"]]
    fixed[:, summary.BACKGROUND_AT + 1] = row[" background"]
    return fixed


def _costs(embeddings: Any, vocabulary: Vocabulary) -> Any:
    """What it costs to mean each word with each token: cross-entropy plus squared error, [num, tokens, words]."""
    known = vocabulary.embeddings
    scale = known.square().sum(-1).mean()
    flat = embeddings.flatten(0, 1)
    distance = (flat.square().sum(-1, keepdim=True) - 2 * flat @ known.T + known.square().sum(-1)) / scale
    distance = distance.view(*embeddings.shape[:2], -1)
    return distance - (-_SHARPNESS * distance).log_softmax(-1)


def _slot_tokens() -> list[list[int]]:
    return [[at + word for word in range(summary.WORDS_PER_SLOT)] for at in summary.SLOT_AT]


def summary_loss(embeddings: Any, batch: Batch, vocabulary: Vocabulary) -> Any:
    """How far embeddings [num, tokens, hidden] are from the summary, in the right order that fits them best."""
    import torch

    costs = _costs(embeddings, vocabulary)
    weights = torch.full((NUM_IMAGE_TOKENS,), _FIXED_WEIGHT)
    weights[summary.COUNT_AT], weights[summary.BACKGROUND_AT] = _COUNT_WEIGHT, _BACKGROUND_WEIGHT
    fixed = costs.gather(-1, batch.fixed.clamp(min=0)[..., None])[..., 0] * (batch.fixed >= 0)
    total = (fixed * weights).sum(-1)
    # [num, slot, word of slot, vocabulary] -> [num, slot, item, word of slot]
    slot_costs = costs[:, torch.tensor(_slot_tokens()), :]
    wanted = batch.slots.transpose(1, 2)[:, None].expand(-1, MAX_ITEMS, -1, -1)
    pairs = slot_costs.gather(-1, wanted).transpose(2, 3)
    word_weights = torch.tensor(_WORD_WEIGHTS).repeat(len(pairs), 1)
    word_weights[:, summary.HEIGHT] *= batch.sure_heights
    pairs = (pairs * word_weights[:, None, None]).sum(-1)
    by_order = torch.stack([sum(pairs[:, s, i] for s, i in enumerate(order)) for order in _PERMUTATIONS], -1)
    total = total + by_order.masked_fill(~batch.orders, float("inf")).amin(-1)
    return total.mean() / (weights.sum() + MAX_ITEMS * sum(_WORD_WEIGHTS))


def score(embeddings: Any, batch: Batch, vocabulary: Vocabulary) -> dict[str, float]:
    """The part of pictures whose nearest words are right: count, background, and for all items colour, kind, ..."""
    import torch

    nearest = _costs(embeddings, vocabulary).argmin(-1)
    found = nearest[:, torch.tensor(_slot_tokens())]
    equal = torch.stack([found == batch.slots[:, list(order)] for order in _PERMUTATIONS], 1)
    equal[..., summary.HEIGHT] |= ~batch.sure_heights[:, None, None]
    equal &= batch.orders[:, :, None, None]
    best = equal.flatten(2).sum(-1).argmax(1)
    right = equal[torch.arange(len(best)), best]
    names = ("colour", "kind", "column", "row", "height")
    result = {name: right[..., i].all(-1).float().mean().item() for i, name in enumerate(names)}
    is_digit = batch.slots[:, 0, summary.KIND] == vocabulary.row_of["0"]
    for digit in "123456789":
        is_digit |= batch.slots[:, 0, summary.KIND] == vocabulary.row_of[digit]
    described = right[..., summary.COLOUR].all(-1) & right[..., summary.KIND].all(-1)
    for name, at in (("count", summary.COUNT_AT), ("background", summary.BACKGROUND_AT)):
        good = nearest[:, at] == batch.fixed[:, at]
        described &= good
        result[name] = good.float().mean().item()
    result["described"] = described[~is_digit].float().mean().item()
    result["digit"] = described[is_digit].float().mean().item()
    return {name: round(value, 3) for name, value in result.items()}
