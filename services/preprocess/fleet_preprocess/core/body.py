"""The client's body as far as preprocess needs it. The ingress has validated it; this only reads."""

from __future__ import annotations

from typing import Any

import msgspec

from fleet_common.errors import InvalidInputError, UnsupportedModalityError

#: Types of parts that hold media.
MEDIA_TYPES = frozenset({"image_url", "video_url", "input_audio"})

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ImageUrl(msgspec.Struct, frozen=True):
    """`detail` low gives the image a small budget where its tokens depend on its size; `max_pixels` sets one."""

    url: str
    detail: str | None = None
    max_pixels: int | None = None


class VideoUrl(msgspec.Struct, frozen=True):
    """`max_pixels` is a budget for each frame."""

    url: str = ""
    max_pixels: int | None = None


class InputAudio(msgspec.Struct, frozen=True):
    """A recording; `data` is base64. What it is, its content decides."""

    data: str = ""


class Part(msgspec.Struct, frozen=True):
    """One element of a message's content list."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    video_url: VideoUrl | None = None
    input_audio: InputAudio | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn; content null or absent counts as empty."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(msgspec.Struct, frozen=True):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """Tools the model gets to know: none when it must not call any."""
        return None if self.tool_choice == "none" else self.tools or None


class CompletionBody(msgspec.Struct, frozen=True):
    """Body of /v1/completions after the ingress has split lists of prompts: one text, or token ids."""

    prompt: str | list[str | int]


class EmbeddingBody(msgspec.Struct, frozen=True):
    """Body of /v1/embeddings: one text, texts, one list of token ids, or lists of them."""

    input: str | list[str | int | list[int]]


class ImageSource(msgspec.Struct, frozen=True):
    """Where an image comes from, and the name of its part for error messages and the timeline.

    Attributes:
        max_pixels: budget the part asks for; 0: none.
        is_low_detail: its `detail` is `low`.
    """

    param: str
    url: str
    max_pixels: int = 0
    is_low_detail: bool = False


class VideoSource(msgspec.Struct, frozen=True):
    """Where a video comes from, the name of its part, and the budget of its frames; 0: none."""

    param: str
    url: str
    max_pixels: int = 0


class AudioSource(msgspec.Struct, frozen=True):
    """A recording in base64, and the name of its part for error messages and the timeline."""

    param: str
    data: str


MediaSource = ImageSource | VideoSource | AudioSource

#: What decoding bytes of strangers raises: wrong shape, wrong encoding, too deep.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)
_embedding = msgspec.json.Decoder(EmbeddingBody)


def read_chat(body: bytes) -> ChatBody:
    """Decode a chat body.

    Raises:
        InvalidInputError: not such a body, an unknown role, or a part without its content.
        UnsupportedModalityError: a part of a kind nobody here reads.
    """
    try:
        chat = _chat.decode(body)
    except _UNREADABLE as error:
        raise InvalidInputError(str(error), code="invalid_body") from error
    if not chat.messages:
        raise InvalidInputError("messages must not be empty", param="messages")
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidInputError(f"unknown role {message.role!r}", param=f"messages[{i}].role")
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                _check_part(part, f"messages[{i}].content[{j}]")
    return chat


def num_text_chars(chat: ChatBody) -> int:
    """Characters a chat template has to write; every value counts as one more, so that empty ones are not free."""
    values: list[Any] = [chat.tools]
    for message in chat.messages:
        values += [message.name, message.tool_calls, message.tool_call_id]
        values += [part.text for part in message.content] if isinstance(message.content, list) else [message.content]
    num_chars = 0
    while values:
        value = values.pop()
        num_chars += 1 + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            values += value
    return num_chars


def media_sources(chat: ChatBody) -> tuple[MediaSource, ...]:
    """The media of a chat in the order of their parts."""
    return tuple(
        _media_source(part, f"messages[{i}].content[{j}].{part.type}")
        for i, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if part.type in MEDIA_TYPES
    )


def _media_source(part: Part, param: str) -> MediaSource:
    if part.type == "input_audio":
        return AudioSource(param=param, data=part.input_audio.data if part.input_audio else "")
    if part.type == "video_url":
        video = part.video_url or VideoUrl()
        return VideoSource(param=param, url=video.url, max_pixels=video.max_pixels or 0)
    return _image_source(part, param)


def _image_source(part: Part, param: str) -> ImageSource:
    asked = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(url=part.image_url or "")
    return ImageSource(
        param=param, url=asked.url, max_pixels=asked.max_pixels or 0, is_low_detail=asked.detail == "low"
    )


def image_url_of(part: Part) -> str:
    """URL of an image part ("" when it has none, which `read_chat` refuses)."""
    if isinstance(part.image_url, ImageUrl):
        return part.image_url.url
    return part.image_url or ""


def read_completion(body: bytes) -> str | list[int]:
    """The prompt of a completion: text, or token ids the client made itself.

    Raises:
        InvalidInputError: not such a body, or more than one prompt (the ingress splits them).
    """
    try:
        prompt = _completion.decode(body).prompt
    except _UNREADABLE as error:
        raise InvalidInputError(str(error), code="invalid_body") from error
    if isinstance(prompt, str):
        return prompt
    texts = [element for element in prompt if isinstance(element, str)]
    if texts:
        if len(prompt) != 1:
            raise InvalidInputError("one prompt per step", param="prompt")
        return texts[0]
    return [element for element in prompt if isinstance(element, int)]


def read_inputs(body: bytes) -> list[str | list[int]]:
    """The inputs of an embeddings body in order, texts or token ids.

    Raises:
        InvalidInputError: not such a body, or one with an empty input.
    """
    try:
        given = _embedding.decode(body).input
    except _UNREADABLE as error:
        raise InvalidInputError(str(error), code="invalid_body") from error
    if isinstance(given, str):
        inputs: list[str | list[int]] = [given]
    elif given and all(isinstance(element, int) for element in given):
        inputs = [[element for element in given if isinstance(element, int)]]
    else:
        inputs = [element for element in given if not isinstance(element, int)]
        if len(inputs) != len(given):
            raise InvalidInputError("token ids and texts must not be mixed in one list", param="input")
    if not inputs or not all(inputs):
        raise InvalidInputError("an input must not be empty", param="input")
    return inputs


def _check_part(part: Part, param: str) -> None:
    if part.type == "text":
        if part.text is None:
            raise InvalidInputError("a text part needs text", param=f"{param}.text")
    elif part.type == "image_url":
        if not image_url_of(part):
            raise InvalidInputError("an image part needs a url", param=f"{param}.image_url")
    elif part.type == "video_url":
        if part.video_url is None or not part.video_url.url:
            raise InvalidInputError("a video part needs a url", param=f"{param}.video_url")
    elif part.type == "input_audio":
        if part.input_audio is None or not part.input_audio.data:
            raise InvalidInputError("an audio part needs data", param=f"{param}.input_audio", code="invalid_audio")
    else:
        raise UnsupportedModalityError(f"parts of type {part.type!r} are not supported", param=param)
