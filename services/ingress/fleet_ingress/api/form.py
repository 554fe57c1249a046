"""Multipart forms: fields and files out of a body that was read already."""

from __future__ import annotations

import io
from dataclasses import dataclass

import multipart

from fleet_common.errors import InvalidInputError

_MAX_PARTS = 64
_FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class FormFile:
    """An uploaded file; `filename` is the client's and proves nothing."""

    filename: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """What a form holds, in its order; a name may come several times."""

    fields: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, FormFile], ...]

    def values(self, *names: str) -> list[str]:
        """Every value of fields of these names."""
        return [value for name, value in self.fields if name in names]

    def value(self, name: str) -> str | None:
        """The one value of a field, None when absent or empty. Raises InvalidInputError when there are several."""
        found = self.values(name)
        if len(found) > 1:
            raise InvalidInputError(f"`{name}` was sent {len(found)} times.", param=name)
        return found[0] if found and found[0] else None


def is_form(content_type: str) -> bool:
    """Whether a Content-Type announces a form."""
    return content_type.partition(";")[0].strip().lower() == _FORM


def read_form(body: bytes, content_type: str) -> Form:
    """Parse a whole body. Takes milliseconds for megabytes: run it in a thread then.

    Raises:
        InvalidInputError: no boundary, broken parts, or a field that is no text.
    """
    _, options = multipart.parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if not boundary:
        raise InvalidInputError("The Content-Type names no boundary.", code="invalid_form")
    limit = len(body) + 1
    fields: list[tuple[str, str]] = []
    files: list[tuple[str, FormFile]] = []
    try:
        parser = multipart.MultipartParser(
            io.BytesIO(body), boundary, part_limit=_MAX_PARTS, spool_limit=limit, memory_limit=limit
        )
        for part in parser:
            if part.filename is not None:
                files.append((part.name, FormFile(part.filename, part.raw)))
            else:
                fields.append((part.name, _text(part.name, part.raw)))
    except (multipart.MultipartError, ValueError) as err:
        raise InvalidInputError("The body is no valid form.", code="invalid_form") from err
    return Form(tuple(fields), tuple(files))


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as err:
        raise InvalidInputError(f"`{name}` is no Unicode text.", param=name, code="invalid_unicode") from err
