"""What an edit begins from: the client's pictures on one canvas, and what of it stays as it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Canvas:
    """
    Attributes:
        pixels: uint8 [height, width, 3].
        strength: above 0 to 1: share of the steps that are taken.
        mask: bool [height, width], True where the picture may change; None: everywhere.
    """

    pixels: Pixels = field(compare=False)
    strength: float
    mask: Mask | None = field(default=None, compare=False)


def lay_out(images: Sequence[Pixels], mask: Mask | None, strength: float) -> Canvas:
    """One canvas of the images, all of its size: side by side, in order, each with its equal part of the width.

    Args:
        mask: of the first image; with one, the others stay as they are.
    """
    height, width, _ = images[0].shape
    if len(images) == 1:
        return Canvas(images[0], strength, mask)
    edges = [round(number * width / len(images)) for number in range(len(images) + 1)]
    parts = [
        np.asarray(Image.fromarray(image).resize((right - left, height), Image.Resampling.LANCZOS))
        for image, (left, right) in zip(images, pairwise(edges), strict=True)
    ]
    whole = None
    if mask is not None:
        whole = np.zeros((height, width), np.bool_)
        narrow = Image.fromarray(mask.astype(np.uint8) * 255).resize((edges[1], height), Image.Resampling.BOX)
        whole[:, : edges[1]] = np.asarray(narrow) > 0
    return Canvas(np.ascontiguousarray(np.concatenate(parts, axis=1)), strength, whole)


def with_kept(made: Pixels, canvas: Canvas | None) -> Pixels:
    """The picture made, with what the mask keeps as the client sent it: a model's autoencoder would blur it."""
    if canvas is None or canvas.mask is None:
        return made
    return np.where(canvas.mask[..., None], made, canvas.pixels)


def num_steps_from(num_steps: int, strength: float) -> int:
    """Steps an edit takes of those asked for, at least one."""
    return max(1, min(int(num_steps * strength), num_steps))
