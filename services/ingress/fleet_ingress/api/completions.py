"""`POST /v1/completions`: the request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fleet_ingress.api.common import MAX_LOGPROBS, GenerationFields


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a text completion.

    Attributes:
        prompt: a string, a list of exactly one, or a list of token ids.
        max_tokens: 16 when absent.
        echo: the answer starts with the prompt; not together with `logprobs`, nor with a prompt of token ids.
        logprobs: alternatives per position; 0 = only the chosen token's.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
