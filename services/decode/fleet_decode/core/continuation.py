"""Going on with a stream another attempt began."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_common.errors import EngineError
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import ChoiceProgress


class StreamDivergedError(EngineError):
    """The new attempt cannot reproduce what the client already has: an error is better than a seam."""

    code = "stream_diverged"


@dataclass(frozen=True, slots=True)
class Route:
    """How one choice gets to its end from where it is.

    Attributes:
        is_over: nothing is left to do; `num_done` counts for usage.
        replay: ids to append to the prompt; their text is rebuilt without being sent again.
        verify: ids the engine has to produce again first, unsent; any other id is a divergence.
        num_text_chars: characters the client has.
        num_done: ids the client has.
        max_tokens, min_tokens: limits of the engine request.
    """

    is_over: bool
    replay: tuple[int, ...]
    verify: tuple[int, ...]
    num_text_chars: int
    num_done: int
    max_tokens: int
    min_tokens: int


def must_restart(params: DecodeParams) -> bool:
    """Whether the next token depends on more than the ids so far.

    Penalties count what was generated, a seeded generator has consumed numbers, and a grammar has a state: none of
    them survives moving generated ids into the prompt.
    """
    has_penalty = (
        params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty not in (0.0, 1.0)
    )
    is_seeded = params.seed is not None and params.temperature > 0.0
    return has_penalty or is_seeded or bool(params.response_schema)


def route(params: DecodeParams, progress: ChoiceProgress | None, budget_tokens: int) -> Route:
    """Decide how a choice goes on.

    Args:
        progress: what the client has; None or empty for a fresh choice.
        budget_tokens: new tokens of the whole choice.
    """
    ids = progress.token_ids if progress is not None else ()
    num_chars = progress.num_text_chars if progress is not None else 0
    is_over = progress is not None and progress.finish_reason is not None
    if not ids or must_restart(params):
        return Route(
            is_over=is_over,
            replay=(),
            verify=ids,
            num_text_chars=num_chars,
            num_done=len(ids),
            max_tokens=budget_tokens,
            min_tokens=params.min_tokens,
        )
    return Route(
        is_over=is_over,
        replay=ids,
        verify=(),
        num_text_chars=num_chars,
        num_done=len(ids),
        max_tokens=budget_tokens - len(ids),
        min_tokens=max(0, params.min_tokens - len(ids)),
    )
