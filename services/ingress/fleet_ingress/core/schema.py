"""JSON Schemas of clients: what can be refused before any work. What the engine's grammar cannot do, decode says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fleet_common.errors import InvalidInputError

#: A schema travels with the work message, which is bounded.
MAX_SCHEMA_BYTES = 16 << 10
MAX_SCHEMA_DEPTH = 32
#: Most repetitions a grammar is asked to count (`maxItems`, `minLength`, ...).
MAX_REPETITIONS = 10_000

#: What OpenAI calls `json_object`.
ANY_OBJECT = '{"type":"object"}'

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
#: Keywords whose schemas describe the same value again.
_SAME_VALUE = ("anyOf", "oneOf", "allOf")


class _FaultError(Exception):
    """What is wrong with the schema."""


def checked_schema(schema: Mapping[str, Any], param: str) -> str:
    """The schema as JSON text.

    Raises:
        InvalidInputError: malformed, too large, too deep, or referring to nothing or only to itself; names `param`.
    """
    try:
        text = msgspec.json.encode(schema).decode()
        if len(text.encode()) > MAX_SCHEMA_BYTES:
            raise _FaultError(f"it has more than {MAX_SCHEMA_BYTES} bytes")
        _Checker(schema).check(schema, 0)
    except _FaultError as fault:
        raise InvalidInputError(f"`{param}` is not usable: {fault}.", param=param, code="invalid_schema") from fault
    except RecursionError as err:
        raise InvalidInputError(f"`{param}` is nested too deeply.", param=param, code="invalid_schema") from err
    return text


class _Checker:
    """Walks one schema. `_known` are schemas known to end, so that none is followed twice."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: set[int] = set()

    def check(self, schema: object, depth: int) -> None:
        """Check a schema and those inside it. Raises _FaultError."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise _FaultError("every schema in it must be an object")
        if depth > MAX_SCHEMA_DEPTH:
            raise _FaultError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        _check_keywords(schema)
        self._check_ends(schema, ())
        for inner in _inner(schema):
            self.check(inner, depth + 1)

    def _check_ends(self, schema: object, path: tuple[int, ...]) -> None:
        """Describing one value must end: no reference leads back without going into the value."""
        if not isinstance(schema, Mapping) or id(schema) in self._known:
            return
        if id(schema) in path:
            raise _FaultError("a `$ref` leads back to itself")
        if len(path) > MAX_SCHEMA_DEPTH:
            raise _FaultError(f"references are chained more than {MAX_SCHEMA_DEPTH} times")
        path = (*path, id(schema))
        if "$ref" in schema:
            self._check_ends(_resolve(schema["$ref"], self._root), path)
        for keyword in _SAME_VALUE:
            members = schema.get(keyword, ())
            for inner in members if isinstance(members, list) else ():
                self._check_ends(inner, path)
        self._known.add(id(schema))


def _check_keywords(schema: Mapping[str, Any]) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _FaultError("`type` must be a JSON type")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise _FaultError("`enum` must be a list of at least one value")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _FaultError("`required` must be a list of names")
    for keyword in _COUNTS:
        count = schema.get(keyword, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_REPETITIONS:
            raise _FaultError(f"`{keyword}` must be a number from 0 to {MAX_REPETITIONS}")


def _inner(schema: Mapping[str, Any]) -> Iterator[object]:
    """Schemas inside a schema."""
    for keyword in _ONE:
        if keyword in schema:
            yield schema[keyword]
    for keyword in _MANY:
        if keyword in schema:
            if not isinstance(schema[keyword], list) or not schema[keyword]:
                raise _FaultError(f"`{keyword}` must be a list of at least one schema")
            yield from schema[keyword]
    for keyword in _NAMED:
        named = schema.get(keyword, {})
        if not isinstance(named, Mapping):
            raise _FaultError(f"`{keyword}` must be an object of schemas")
        yield from named.values()


def _resolve(ref: object, root: Mapping[str, Any]) -> object:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise _FaultError("`$ref` must point into the schema itself (`#/$defs/...`)")
    target: object = root
    for key in ref.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            raise _FaultError(f"`$ref` {ref[:100]!r} points to nothing")
        target = target[key]
    return target
