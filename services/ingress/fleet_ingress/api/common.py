"""Fields both generation routes share, with their ranges. Null counts as absent, unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

#: Most alternatives per position (`top_logprobs`, `logprobs` of completions).
MAX_LOGPROBS = 20
#: Most stop strings, as OpenAI has it.
MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 64
#: Most entries of `logit_bias`: they travel with the work message.
MAX_LOGIT_BIAS = 300
#: Stop strings travel with the work message, which is bounded.
MAX_STOP_CHARS = 1000

TokenCount = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk before `[DONE]` with the token counts."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling and bookkeeping.

    Attributes:
        model: a name from `/v1/models`.
        n: choices.
        stop: up to four strings that end a choice and are not part of its text.
        top_k: extension; 0 or -1 = off.
        min_p: extension; share of the best token's probability below which a token is not sampled.
        repetition_penalty: extension; above 1 discourages what was said.
        min_tokens: extension; no end of text before this many tokens.
        ignore_eos: extension; go on after the end of text, to `max_tokens`.
        stop_token_ids: extension; tokens that end a choice.
        logit_bias: token id, as text -> what is added to its logit, -100 to 100.
        service_tier: `flex` puts the request into the batch class, everything else into the realtime class.
        priority: extension; the priority class, wins over `service_tier`.
        user, safety_identifier, prompt_cache_key, metadata, store, request_id: bookkeeping without effect on the
            answer; `store` must be false.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]] | None = None
    logit_bias: dict[str, float] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: Literal["realtime", "batch", "background"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


#: Fields of other servers' APIs that are refused unless they ask for nothing: name -> values that do.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
    "annotations": ([],),
}

#: Fields a client may well know from elsewhere; the refusal says "not supported yet" instead of "unknown".
NOT_SUPPORTED_YET = frozenset(
    {
        *NEUTRAL_VALUES,
        "audio",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "guided_json",
        "guided_regex",
        "prediction",
        "prompt_logprobs",
        "reasoning_effort",
        "structured_outputs",
        "use_beam_search",
        "verbosity",
        "web_search_options",
    }
)
