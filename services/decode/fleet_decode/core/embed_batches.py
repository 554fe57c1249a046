"""Which inputs go through the model together: of like length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence


def batches_by_length(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Indices of the inputs, longest first, cut into batches.

    Args:
        lengths: tokens of each input, at least 1.
        max_batch_tokens: tokens of a batch, padding included; an input above it is alone in its batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        # The first of a batch is its longest: it says how wide the batch is.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
