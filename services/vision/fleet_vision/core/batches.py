"""Which images share one pass through the tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """Images of one pass.

    Attributes:
        indices: which of the images.
        num_needed: patches of the images.
        num_padding: blank patches besides.
    """

    indices: tuple[int, ...]
    num_needed: int
    num_padding: int = 0

    @property
    def num_computed(self) -> int:
        """Patches the tower computes."""
        return self.num_needed + self.num_padding


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one pass.

    Attributes:
        max_images: images, or fewer; by shape each frame of a video counts, but one video is never cut.
        max_patches: patches of a packed pass; an image that has more goes alone. 0: any.
        align: packed passes are filled up to a multiple of so many patches; 1: never.
    """

    max_images: int
    max_patches: int = 0
    align: int = 1


def batches_by_shape(shapes: Sequence[tuple[int, ...]], num_patches: Sequence[int], limits: BatchLimits) -> list[Batch]:
    """Batches of one shape each, in order of first appearance."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(i)
    batches: list[Batch] = []
    for shape, indices in by_shape.items():
        most = max(1, limits.max_images // max(1, math.prod(shape[:-3])))
        batches += [_batch(indices[start : start + most], num_patches, 1) for start in range(0, len(indices), most)]
    return batches


def packed_batches(num_patches: Sequence[int], limits: BatchLimits, unit: int = 1) -> list[Batch]:
    """Batches of any shapes, the longest images first: neighbours in length, so that no pass waits for one giant.

    Args:
        unit: patches that a pass grows by at least; alignment is rounded up to it.
    """
    align = -(-limits.align // unit) * unit if limits.align > 1 else 1
    packs: list[list[int]] = []
    filled = 0
    for i in sorted(range(len(num_patches)), key=lambda i: -num_patches[i]):
        is_full = bool(limits.max_patches) and filled + num_patches[i] > limits.max_patches
        if not packs or len(packs[-1]) == limits.max_images or is_full:
            packs.append([])
            filled = 0
        packs[-1].append(i)
        filled += num_patches[i]
    return [_batch(pack, num_patches, align) for pack in packs]


def _batch(indices: Sequence[int], num_patches: Sequence[int], align: int) -> Batch:
    needed = sum(num_patches[i] for i in indices)
    return Batch(tuple(indices), needed, num_padding=-needed % align)
