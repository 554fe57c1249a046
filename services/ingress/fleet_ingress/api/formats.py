"""`response_format` of a chat completion."""

from __future__ import annotations

from typing import Any

import msgspec


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """Some JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema and its name. `strict` has no effect: the answer always obeys."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that obeys a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
