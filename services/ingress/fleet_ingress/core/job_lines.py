"""From a JSONL file to the lines of a job, and back: outcomes to the files a batch ends with. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from fleet_common.errors import InvalidInputError
from fleet_contracts.jobs import LineOutcome

#: Longest name a client gives a line.
MAX_CUSTOM_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"
_JSON = "application/json"


class LineError(InvalidInputError):
    """A line of the file is none. `line` from 1."""

    def __init__(self, line: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(f"Line {line}: {message}", param=param, code=code)
        self.line = line


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a job. `body` is what the client would send online; `number` from 1 as in the file."""

    number: int
    custom_id: str
    body: bytes


class _BatchLine(msgspec.Struct, frozen=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: str
    url: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(_BatchLine).decode


def parse_lines(content: bytes, endpoint: str, max_lines: int) -> list[Line]:
    """The lines of a batch file; empty lines are skipped. Milliseconds per megabyte: run it in a thread.

    Raises:
        LineError: a line is no JSON, has a field missing or wrong, another `url`, or a `custom_id` that was there.
        InvalidInputError: no lines, or more than `max_lines`.
    """
    lines: list[Line] = []
    first_by_id: dict[str, int] = {}
    for number, raw in enumerate(content.removeprefix(_BOM).split(b"\n"), start=1):
        text = raw.strip()
        if not text:
            continue
        line = _parse_line(number, text, endpoint)
        first = first_by_id.setdefault(line.custom_id, number)
        if first != number:
            message = f"`custom_id` is that of line {first} already."
            raise LineError(number, message, "duplicate_custom_id", "custom_id")
        lines.append(line)
        if len(lines) > max_lines:
            message = f"The file holds more than {max_lines} lines."
            raise InvalidInputError(message, param="input_file_id", code="too_many_lines")
    if not lines:
        raise InvalidInputError("The file holds no lines.", param="input_file_id", code="empty_file")
    return lines


def encode_line(line: Line, endpoint: str) -> bytes:
    """A line as `parse_lines` reads it, without the end of line."""
    return msgspec.json.encode(
        _BatchLine(custom_id=line.custom_id, method="POST", url=endpoint, body=msgspec.Raw(line.body))
    )


def _parse_line(number: int, text: bytes, endpoint: str) -> Line:
    try:
        found = _decode(text)
    except msgspec.ValidationError as err:
        reason, _, path = str(err).partition(" - at ")
        param = path.strip("`").removeprefix("$.") or None
        raise LineError(number, f"{reason}.", "invalid_line", param) from err
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as err:
        raise LineError(number, "no valid JSON object.", "invalid_json_line") from err
    if found.method.upper() != "POST":
        raise LineError(number, "`method` must be POST.", "invalid_method", "method")
    if found.url != endpoint:
        raise LineError(number, f"`url` must be the endpoint of the batch, {endpoint}.", "invalid_url", "url")
    return Line(number, found.custom_id, bytes(found.body))


@dataclass(frozen=True, slots=True)
class Output:
    """What a batch ends with: JSONL of the answers, and of the errors; b"" for none."""

    answers: bytes
    errors: bytes


def make_output(
    job_id: str, lines: Iterable[Line], outcomes: Mapping[int, LineOutcome], missing: tuple[str, str] | None
) -> Output:
    """The two files, one line per line of the input, in its order.

    Args:
        outcomes: by line number, bodies in place.
        missing: code and message of lines without an outcome; None: they are left out.
    """
    answers: list[bytes] = []
    errors: list[bytes] = []
    for line in lines:
        outcome = outcomes.get(line.number)
        if outcome is not None:
            (answers if outcome.status < 400 else errors).append(_output_line(job_id, outcome))
        elif missing is not None:
            error = {"code": missing[0], "message": missing[1]}
            errors.append(_encode(job_id, line.number, line.custom_id, None, error))
    return Output(b"".join(answers), b"".join(errors))


def _output_line(job_id: str, outcome: LineOutcome) -> bytes:
    response = {"status_code": outcome.status, "request_id": outcome.request_id, "body": _body(outcome)}
    return _encode(job_id, outcome.line, outcome.custom_id, response, None)


def _body(outcome: LineOutcome) -> object:
    """JSON as it is, anything else in base64."""
    if outcome.content_type.partition(";")[0].strip() == _JSON:
        return msgspec.Raw(outcome.body)
    return {"content_type": outcome.content_type, "base64": base64.b64encode(outcome.body).decode()}


def _encode(job_id: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    fields = {
        "id": f"batch_req_{job_id.partition('_')[2]}_{number}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(fields) + b"\n"
