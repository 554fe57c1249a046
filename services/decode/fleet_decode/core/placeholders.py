"""Media tokens in a prompt: many per image as the model sees it, one per image as vLLM wants it."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_common.errors import InvalidInputError


def collapse(prompt: Sequence[int], media_token_id: int, num_tokens: Sequence[int]) -> list[int]:
    """Put one media token in place of each image's.

    Args:
        prompt: token ids, `num_tokens[i]` media tokens in a row for image i, or one already.
        num_tokens: tokens per image, in order.
    Raises:
        InvalidInputError: the prompt's media tokens are not those of the images.
    """
    num_media = sum(1 for token_id in prompt if token_id == media_token_id)
    if num_media == len(num_tokens):
        return list(prompt)
    if num_media != sum(num_tokens):
        raise InvalidInputError(f"the prompt has {num_media} image tokens, its images have {sum(num_tokens)}")
    collapsed: list[int] = []
    position = 0
    remaining = iter(num_tokens)
    while position < len(prompt):
        collapsed.append(prompt[position])
        if prompt[position] != media_token_id:
            position += 1
            continue
        size = next(remaining)
        if any(token_id != media_token_id for token_id in prompt[position : position + size]):
            raise InvalidInputError("an image's tokens are not in one piece")
        position += size
    return collapsed


def replace_some(ids: Sequence[int], old_id: int, new_id: int, chosen: Sequence[bool]) -> list[int]:
    """`new_id` in place of those `old_id` that are chosen, one flag for each of them in order."""
    flags = iter(chosen)
    return [new_id if token_id == old_id and next(flags) else token_id for token_id in ids]
