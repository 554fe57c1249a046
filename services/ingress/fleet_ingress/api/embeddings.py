"""`POST /v1/embeddings`: request and answer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

#: Most inputs of one request, as OpenAI has it.
MAX_INPUTS = 2048


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an embeddings request.

    Attributes:
        input: a text, texts, one list of token ids, or lists of them; ids are taken as they are, without special tokens
            around them.
        encoding_format: `float` (default), or `base64` of little-endian float32.
        dimensions: width of the vectors; only of models that were trained to be cut.
        priority: extension; the priority class.
        user, safety_identifier, request_id: bookkeeping without effect on the answer.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    priority: Literal["realtime", "batch", "background"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    request_id: str | None = None


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs together, special ones included."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of input number `index`: numbers, or base64 text."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """One vector per input, in order."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
