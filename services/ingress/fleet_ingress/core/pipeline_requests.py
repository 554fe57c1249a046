"""What each step of a pipeline asks the fleet for, and what a pipeline is for the one request that names it. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleet_common.errors import InvalidInputError
from fleet_ingress.api.chat import AudioPart, ChatMessage, ChatRequest, ImagePart, Part, TextPart, VideoPart
from fleet_ingress.api.form import Form, FormFile
from fleet_ingress.core.pipeline_file import (
    HISTORY,
    MESSAGES,
    ChatParams,
    DrawParams,
    Pipeline,
    Source,
    SpeakParams,
    Step,
    TranscribeParams,
)

#: What a request says about the exchange, not about sampling.
_OF_THE_EXCHANGE = frozenset(
    {"model", "messages", "stream", "stream_options", "modalities", "audio", "n", "service_tier", "priority"}
)
#: What an answer put together of several steps cannot have.
_REFUSED = ("tools", "tool_choice", "logprobs", "top_logprobs", "execution")

#: Parts of a message, as pipelines call what they hold.
_KINDS: Mapping[type[Part], str] = {TextPart: "text", ImagePart: "image", VideoPart: "video", AudioPart: "audio"}

#: The steps of a chat whose answer is spoken, and the format of speech when a request names none.
CHAT_STEP, SPEECH_STEP = "answer", "say"
DEFAULT_FORMAT = "wav"


@dataclass(frozen=True, slots=True)
class Value:
    """What goes from step to step: a text, files or links of pictures, or a sound file."""

    text: str = ""
    images: tuple[str, ...] = ()
    audio: bytes = b""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request for several steps.

    Attributes:
        inputs: what the client sent, by name.
        fields: of the request that the step that answers gets.
        audio_format, voice: of the speech; voice "": the pipeline's.
    """

    inputs: dict[str, Value] = field(default_factory=dict)
    messages: tuple[ChatMessage, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    priority: str | None = None
    audio_format: str = DEFAULT_FORMAT
    voice: str = ""


def spoken_chat(model: str, speech_model: str) -> Pipeline:
    """A chat whose answer is read aloud while it is written."""
    answer = Step(id=CHAT_STEP, stage="chat", model=model, inputs={MESSAGES: Source("", MESSAGES)}, params=ChatParams())
    say = Step(
        id=SPEECH_STEP,
        stage="speak",
        model=speech_model,
        inputs={"text": Source(CHAT_STEP, "text")},
        params=SpeakParams(),
        streamed=frozenset({"text"}),
    )
    outputs = {"audio": Source(SPEECH_STEP, "audio")}
    return Pipeline(name=model, inputs=("text", "image", "audio"), steps=(answer, say), outputs=outputs)


def asked_of(request: ChatRequest, pipeline: Pipeline) -> Asked:
    """What a pipeline gets of a chat request. Raises InvalidInputError."""
    _check_fields(request, pipeline)
    sources = {source for step in pipeline.steps for source in step.inputs.values() if not source.step}
    takes_all = Source("", MESSAGES) in sources
    inputs = {} if takes_all else _inputs(request, pipeline)
    fields = {
        name: value
        for name in ChatRequest.__struct_fields__
        if name not in _OF_THE_EXCHANGE and (value := getattr(request, name)) is not None
    }
    wanted = request.audio
    audio_format = (wanted.format if wanted is not None else None) or DEFAULT_FORMAT
    flex = "batch" if request.service_tier == "flex" else None
    return Asked(
        inputs=inputs,
        messages=tuple(request.messages),
        fields=fields,
        priority=request.priority or flex,
        audio_format="pcm" if audio_format == "pcm16" else audio_format,
        voice=(wanted.voice or "") if wanted is not None else "",
    )


def _check_fields(request: ChatRequest, pipeline: Pipeline) -> None:
    for name in _REFUSED:
        if getattr(request, name) not in (None, [], False):
            raise InvalidInputError(
                f"`{name}` does not go with a pipeline or a spoken answer.", param=name, code="unsupported_parameter"
            )
    if (request.n or 1) > 1:
        raise InvalidInputError("A pipeline, or a spoken answer, has one choice.", param="n")
    if request.max_tokens and request.max_completion_tokens and request.max_tokens != request.max_completion_tokens:
        raise InvalidInputError(
            "`max_tokens` and `max_completion_tokens` say different things; send one.", param="max_completion_tokens"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidInputError("`stream_options` needs `stream` to be true.", param="stream_options")
    if request.audio is not None and "audio" not in pipeline.outputs:
        raise InvalidInputError("This pipeline does not speak.", param="audio")
    for name in request.modalities or ():
        if name == "audio" and "audio" not in pipeline.outputs:
            raise InvalidInputError("This pipeline does not speak.", param="modalities")


def _inputs(request: ChatRequest, pipeline: Pipeline) -> dict[str, Value]:
    """The media of the last message, which is the user's."""
    if not request.messages or request.messages[-1].role != "user":
        raise InvalidInputError("The last message must be the user's.", param="messages")
    place = f"messages[{len(request.messages) - 1}].content"
    content = request.messages[-1].content
    parts = [TextPart(text=content)] if isinstance(content, str) else content or []
    texts: list[str] = []
    images: list[str] = []
    sounds: list[bytes] = []
    for number, part in enumerate(parts):
        where = f"{place}[{number}]" if isinstance(content, list) else place
        kind = _KINDS.get(type(part))
        if kind is None:
            raise InvalidInputError("Parts of this type are not supported yet.", param=where, code="unsupported_part")
        if kind not in pipeline.inputs:
            raise InvalidInputError(f"`{pipeline.name}` takes no {kind}.", param=where, code="unsupported_modality")
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, ImagePart):
            images.append(part.image_url.url)
        elif isinstance(part, AudioPart):
            sounds.append(sound_file(part, where))
    if len(sounds) > 1:
        raise InvalidInputError("One `input_audio` per request.", param=place, code="too_many_parts")
    text = "\n".join(texts).strip()
    found = {"text": Value(text=text) if text else None}
    found["image"] = Value(images=tuple(images)) if images else None
    found["audio"] = Value(audio=sounds[0]) if sounds else None
    for name in pipeline.inputs:
        if found[name] is None:
            raise InvalidInputError(
                f"`{pipeline.name}` needs {name} in the last message.",
                param=place,
                code="missing_required_parameter",
            )
    return {name: value for name, value in found.items() if value is not None}


def sound_file(part: AudioPart, where: str) -> bytes:
    """The file of an `input_audio` part. Raises InvalidInputError."""
    try:
        data = base64.b64decode(part.input_audio.data, validate=True)
    except (binascii.Error, ValueError) as err:
        raise InvalidInputError(
            "`data` is no base64.", param=f"{where}.input_audio.data", code="invalid_audio"
        ) from err
    if not data:
        raise InvalidInputError("The sound is empty.", param=f"{where}.input_audio.data", code="invalid_audio")
    return data


def chat_body(step: Step, values: dict[str, Value], asked: Asked, *, is_answering: bool) -> bytes:
    """The body of the chat that a step is."""
    assert isinstance(step.params, ChatParams)
    params = _given(step.params)
    system, prompt = params.pop("system", None), params.pop("prompt", "{text}")
    if MESSAGES in step.inputs:
        messages: list[Any] = _without_nulls(list(asked.messages))
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        if HISTORY in step.inputs:
            messages += _without_nulls(list(asked.messages[:-1]))
        text = prompt.replace("{text}", values["text"].text) if "text" in values else prompt
        images = values["image"].images if "image" in values else ()
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        messages.append({"role": "user", "content": content})
    # What the client says wins over what the file says.
    fields = {**params, **_without_nulls(asked.fields)} if is_answering else params
    if "max_completion_tokens" in fields:
        fields.pop("max_tokens", None)
    return msgspec.json.encode({"model": step.model, "messages": messages, **_class(asked), **fields})


def speech_body(step: Step, text: str, asked: Asked) -> bytes:
    """The body of the speech of a text. Samples are asked for: sentences are put together before they become a file."""
    assert isinstance(step.params, SpeakParams)
    params = _given(step.params)
    if asked.voice:
        params["voice"] = asked.voice
    fields = {"model": step.model, "input": text, "response_format": "pcm", **params, **_class(asked)}
    return msgspec.json.encode(fields)


def image_body(step: Step, values: dict[str, Value], asked: Asked) -> bytes:
    """The body of the request for a picture."""
    assert isinstance(step.params, DrawParams)
    params = _given(step.params)
    prompt = params.pop("prompt", "{text}").replace("{text}", values["text"].text)
    return msgspec.json.encode({"model": step.model, "prompt": prompt, **params, **_class(asked)})


def transcription_form(step: Step, values: dict[str, Value], asked: Asked) -> Form:
    """The form of the request for a transcript."""
    assert isinstance(step.params, TranscribeParams)
    fields = {"model": step.model, **_given(step.params), **_class(asked)}
    file = FormFile(filename="input", data=values["audio"].audio)
    return Form(tuple((name, str(value)) for name, value in fields.items()), (("file", file),))


def picture_url(file: bytes, media_type: str) -> str:
    """A picture as later steps and clients take it."""
    return f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"


def _class(asked: Asked) -> dict[str, str]:
    return {"priority": asked.priority} if asked.priority is not None else {}


def _given(params: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(params).items() if value is not None}


def _without_nulls(value: Any) -> Any:
    return _drop(msgspec.to_builtins(value))


def _drop(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop(item) for key, item in value.items() if item is not None}
    return [_drop(item) for item in value] if isinstance(value, list) else value
