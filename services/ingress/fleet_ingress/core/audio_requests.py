"""Requests about audio, checked beyond their types. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet_common.errors import InvalidInputError
from fleet_contracts.audio import SpeakParams, TranscribeParams
from fleet_contracts.base import PriorityClass
from fleet_contracts.decode import DecodeParams
from fleet_contracts.preprocess import PreprocessParams
from fleet_ingress.api.audio import (
    GRANULARITIES,
    SPEECH_FORMATS,
    STREAMED_FORMATS,
    TRANSCRIPT_FORMATS,
    SpeechRequest,
)
from fleet_ingress.api.form import Form
from fleet_ingress.core.parsed import ParsedRequest

_GRANULARITY_NAMES = ("timestamp_granularities[]", "timestamp_granularities")
_KNOWN = frozenset(
    {"model", "language", "prompt", "response_format", "temperature", "stream", "priority", "user", *_GRANULARITY_NAMES}
)
#: Fields of OpenAI's that are refused unless they ask for nothing.
_NEUTRAL = {"chunking_strategy": ("auto",)}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}

#: The prompt travels with the work message, which is bounded; models look at its last few hundred characters.
_MAX_PROMPT_CHARS = 4096


@dataclass(frozen=True, slots=True)
class AudioRequest:
    """A checked request, and what it is about: the file, or the text in UTF-8."""

    parsed: ParsedRequest
    root: bytes


def parse_speech(request: SpeechRequest) -> AudioRequest:
    """Check a request to speak. Raises InvalidInputError."""
    if not request.input.strip():
        raise InvalidInputError("`input` must not be empty.", param="input")
    response_format = _one_of("response_format", request.response_format or "mp3", SPEECH_FORMATS)
    _one_of("stream_format", request.stream_format or "audio", ("audio",))
    params = SpeakParams(
        voice=request.voice or "", speed=1.0 if request.speed is None else request.speed, format=response_format
    )
    parsed = ParsedRequest(
        route="speech",
        model=request.model,
        preprocess=PreprocessParams(),
        decode=DecodeParams(),
        priority_class=_priority(request.priority),
        is_stream=True,
        audio=params,
        response_format=response_format,
    )
    return AudioRequest(parsed, request.input.encode())


def parse_transcription(form: Form) -> AudioRequest:
    """Check a form to transcribe. Raises InvalidInputError."""
    _check_names(form)
    model = form.value("model")
    if model is None:
        raise InvalidInputError("`model` is required.", param="model", code="missing_required_parameter")
    granularities = _granularities(form)
    wanted = form.value("response_format") or ("verbose_json" if granularities else "json")
    response_format = _one_of("response_format", wanted, TRANSCRIPT_FORMATS)
    if granularities and response_format != "verbose_json":
        raise InvalidInputError(
            "`timestamp_granularities` needs `response_format` to be verbose_json.", param="timestamp_granularities"
        )
    is_stream = _truth(form, "stream")
    if is_stream and response_format not in STREAMED_FORMATS:
        raise InvalidInputError(
            f"A streamed transcript has the `response_format` {' or '.join(STREAMED_FORMATS)}.",
            param="response_format",
        )
    params = TranscribeParams(
        language=(form.value("language") or "").lower().partition("-")[0],
        prompt=_prompt(form),
        temperature=_temperature(form),
        word_timestamps="word" in granularities,
    )
    parsed = ParsedRequest(
        route="transcription",
        model=model,
        preprocess=PreprocessParams(route="audio"),
        decode=DecodeParams(),
        priority_class=_priority(form.value("priority")),
        is_stream=is_stream,
        audio=params,
        response_format=response_format,
        granularities=granularities or ("segment",),
    )
    return AudioRequest(parsed, _file(form))


def _check_names(form: Form) -> None:
    for name, value in form.fields:
        if name in _NEUTRAL and value in _NEUTRAL[name]:
            continue
        if name == "file":
            raise InvalidInputError("`file` must be a file, with a name.", param="file")
        if name not in _KNOWN:
            raise InvalidInputError(f"Unknown or unsupported field `{name}`.", param=name, code="unknown_parameter")
    for name, _ in form.files:
        if name != "file":
            raise InvalidInputError(f"`{name}` is no file.", param=name, code="unknown_parameter")


def _file(form: Form) -> bytes:
    if len(form.files) != 1:
        code = "missing_required_parameter" if not form.files else None
        raise InvalidInputError("Exactly one `file` is required.", param="file", code=code)
    data = form.files[0][1].data
    if not data:
        raise InvalidInputError("The file is empty.", param="file", code="invalid_audio")
    return data


def _granularities(form: Form) -> tuple[str, ...]:
    found = form.values(*_GRANULARITY_NAMES)
    for value in found:
        _one_of("timestamp_granularities", value, GRANULARITIES)
    return tuple(dict.fromkeys(found))


def _prompt(form: Form) -> str:
    prompt = form.value("prompt") or ""
    if len(prompt) > _MAX_PROMPT_CHARS:
        raise InvalidInputError(f"`prompt` has at most {_MAX_PROMPT_CHARS} characters.", param="prompt")
    return prompt


def _temperature(form: Form) -> float:
    text = form.value("temperature") or "0"
    try:
        temperature = float(text)
    except ValueError as err:
        raise InvalidInputError("`temperature` is no number.", param="temperature") from err
    if not 0.0 <= temperature <= 1.0:
        raise InvalidInputError("`temperature` is from 0 to 1.", param="temperature")
    return temperature


def _truth(form: Form, name: str) -> bool:
    text = (form.value(name) or "false").lower()
    _one_of(name, text, tuple(_TRUTH))
    return _TRUTH[text]


def _priority(name: str | None) -> PriorityClass:
    if name is None:
        return PriorityClass.REALTIME
    return PriorityClass(_one_of("priority", name, tuple(PriorityClass)))


def _one_of(param: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise InvalidInputError(f"`{param}` is one of: {', '.join(allowed)}.", param=param, code="invalid_value")
    return value
