"""Bytes to typed requests: the fast path is one msgspec decode; a slow one explains or forgives what that refused."""

from __future__ import annotations

import json
import re
from typing import TypeVar

import msgspec

from fleet_common.errors import InvalidInputError
from fleet_ingress.api.common import NEUTRAL_VALUES, NOT_SUPPORTED_YET

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_PLACED = re.compile(r"^(?P<reason>.*) - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
#: JSON Schemas of clients: a null in one (`"const": null`) says something.
_OPAQUE = frozenset({"schema", "parameters"})
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """The typed request. Takes milliseconds for bodies of megabytes: run it in a thread then.

    Raises:
        InvalidInputError: malformed JSON, a lone surrogate, a wrong, missing, unknown or unsupported field; `param`
            names it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return _decode_slowly(body, kind)
    except (msgspec.DecodeError, RecursionError) as err:
        raise _malformed(body) from err


def decode_fields(fields: dict[str, str], kind: type[RequestT]) -> RequestT:
    """The typed request of a form's fields, whose values are all text. Raises InvalidInputError."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as err:
        raise _explained(str(err)) from err


def _decode_slowly(body: bytes, kind: type[RequestT]) -> RequestT:
    """Again, with nulls and fields that ask for nothing left out."""
    try:
        value = msgspec.json.decode(body)
        if not isinstance(value, dict):
            raise InvalidInputError("The body must be a JSON object.", code="invalid_json")
        return msgspec.convert(_drop_neutral(_drop_nulls(value), frozenset(kind.__struct_fields__)), kind)
    except msgspec.ValidationError as err:
        raise _explained(str(err)) from err
    except (msgspec.DecodeError, RecursionError) as err:
        raise _malformed(body) from err


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: item if key in _OPAQUE else _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


def _drop_neutral(value: object, known: frozenset[str]) -> object:
    """Without fields that ask for nothing; those the route knows (`known`) mean what they say."""
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if key in known or not _is_neutral(key, item)}
    options = kept.get("stream_options")
    if isinstance(options, dict):
        kept["stream_options"] = {key: item for key, item in options.items() if not _is_neutral(key, item)}
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [
            {key: item for key, item in message.items() if not (key == "annotations" and item == [])}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    return kept


def _is_neutral(key: str, value: object) -> bool:
    # `1 == True` in Python: compare types too.
    return any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL_VALUES.get(key, ()))


def _malformed(body: bytes) -> InvalidInputError:
    """Why the bytes are no JSON; a lone surrogate gets its own code, as clients do send them."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return InvalidInputError("The body is not valid JSON.", code="invalid_json")
    place = _find_surrogate(value, "")
    if place is None:
        return InvalidInputError("The body is not valid JSON.", code="invalid_json")
    return InvalidInputError(
        "A string holds a lone surrogate, which is no Unicode text.", param=place or None, code="invalid_unicode"
    )


def _find_surrogate(value: object, place: str) -> str | None:
    if isinstance(value, str):
        return place if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if _SURROGATE.search(key):
                return place
            if (found := _find_surrogate(item, f"{place}.{key}" if place else key)) is not None:
                return found
    if isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _find_surrogate(item, f"{place}[{index}]")) is not None:
                return found
    return None


def _explained(reason: str) -> InvalidInputError:
    """msgspec's reason in the words of the API."""
    if match := _UNKNOWN.match(reason):
        name, param = match["name"], _join(match["path"], match["name"])
        if name in NOT_SUPPORTED_YET:
            return InvalidInputError(f"`{param}` is not supported yet.", param=param, code="unsupported_parameter")
        return InvalidInputError(f"Unknown field `{param}`.", param=param, code="unknown_parameter")
    if match := _MISSING.match(reason):
        param = _join(match["path"], match["name"])
        return InvalidInputError(f"`{param}` is required.", param=param, code="missing_required_parameter")
    if match := _PLACED.match(reason):
        # `[...]` is some key or value of a mapping.
        param = match["path"].partition("[...]")[0]
        return InvalidInputError(f"`{param}`: {match['reason']}.", param=param, code="invalid_value")
    return InvalidInputError(f"{reason}.", code="invalid_value")


def _join(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name
