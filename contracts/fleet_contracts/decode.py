"""Stage `decode`: token ids and embeddings in, tokens out (as events)."""

from __future__ import annotations

from fleet_contracts.base import Contract


class DecodeParams(Contract, frozen=True, kw_only=True, tag="decode.v1"):
    """Sampling parameters; names and meaning are OpenAI's where OpenAI has them.

    Attributes:
        max_tokens: new tokens per choice; 0 = as many as the context leaves.
        stop: strings that end a choice and are not part of its text.
        logprobs: alternatives per position to report, None = no logprobs (0 = only the chosen token's).
        logit_bias: token id -> bias.
        adapter: LoRA adapter name, "" for none.
        response_schema: JSON Schema text the output must obey, "" for none.
        echo_prompt_text: text put before the answer of a completion that asked for `echo`.
    """

    max_tokens: int = 0
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    adapter: str = ""
    response_schema: str = ""
    echo_prompt_text: str = ""


class TokenAlternative(Contract, frozen=True, kw_only=True):
    """One candidate token at a position. `bytes_` are its UTF-8 bytes (may be part of a character)."""

    token: str
    token_id: int
    logprob: float
    bytes_: bytes = b""


class TokenLogprob(Contract, frozen=True, kw_only=True):
    """The chosen token and its alternatives, best first."""

    chosen: TokenAlternative
    top: tuple[TokenAlternative, ...] = ()
