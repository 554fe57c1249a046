"""OpenAI's error envelope: the only shape an error has here."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong.

    Attributes:
        type: `invalid_request_error`, `authentication_error`, `not_found_error`, `rate_limit_error`, `server_error`.
        param: the field or part at fault, like `messages[0].content[1].image_url`.
        code: stable machine-readable word.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer with a status from 400 on, and of an SSE event that ends a stream early."""

    error: ErrorBody
