"""What the client asked for, as an engine needs it."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_common.errors import ContextLengthError
from fleet_contracts.decode import DecodeParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is sampled; a field per property every engine has.

    Attributes:
        max_tokens: new tokens, at least 1.
        num_logprobs: alternatives per position, None = no logprobs, 0 = only the chosen token's.
        logit_bias: (token id, bias) pairs.
        response_schema: JSON Schema text, "" for none.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    response_schema: str = ""


def token_budget(params: DecodeParams, num_prompt_tokens: int, context_tokens: int) -> int:
    """New tokens one choice may have: what was asked for, or what the context leaves, whichever is less.

    Raises:
        ContextLengthError: the prompt leaves no room for a single token.
    """
    room = context_tokens - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and the context of the model is {context_tokens} tokens"
        )
    return min(params.max_tokens, room) if params.max_tokens > 0 else room


def choice_sampling(params: DecodeParams, choice: int, *, max_tokens: int, min_tokens: int) -> Sampling:
    """Sampling of one choice. Choices of a seeded request get seed, seed + 1, ... so that they differ."""
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        seed=None if params.seed is None else params.seed + choice,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.logprobs,
        logit_bias=tuple((params.logit_bias or {}).items()),
        response_schema=params.response_schema,
    )


def end_token_ids(params: DecodeParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end a choice."""
    ends = frozenset(params.stop_token_ids)
    return ends if params.ignore_eos else ends | eos_token_ids
