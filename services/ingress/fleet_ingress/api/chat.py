"""`POST /v1/chat/completions`: the request."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet_ingress.api.common import MAX_LOGPROBS, GenerationFields, TokenCount
from fleet_ingress.api.formats import ResponseFormat
from fleet_ingress.api.tools import NamedTool, Tool


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the assistant called; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an earlier assistant turn."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """A piece of text."""

    text: str


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a picture is: a `data:` URL, or http(s) where the operator allows the host.

    Attributes:
        detail: `low` gives the picture fewer tokens where they depend on its size.
        max_pixels: extension; pixel budget of this picture.
    """

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image_url"):
    """A picture; the order of parts is the order in the prompt."""

    image_url: ImageUrl


class InputAudio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recording: the bytes of its file in base64, without `data:` before them."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_audio"):
    """Something said or played; the order of parts is the order in the prompt."""

    input_audio: InputAudio


class VideoUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a video is: a `data:` URL, or http(s) where the operator allows the host.

    Attributes:
        max_pixels: extension; pixel budget of each of its frames.
    """

    url: str
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = None


class VideoPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="video_url"):
    """A video, of which the model sees frames evenly spread in time; the order of parts is the order in the prompt."""

    video_url: VideoUrl


class FilePart(msgspec.Struct, frozen=True, kw_only=True, tag="file"):
    """Not supported yet: refused with the part's place."""


Part = TextPart | ImagePart | AudioPart | VideoPart | FilePart


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. An assistant turn with `tool_calls` may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class SpeechWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the answer is spoken. `voice`: one of the model that speaks; `format`: absent: wav."""

    voice: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"] | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a chat completion.

    Attributes:
        max_completion_tokens: same as `max_tokens`; both with different values are refused.
        logprobs, top_logprobs: log probability of each token, and of that many alternatives.
        max_pixels: extension; pixel budget per picture.
        execution: extension; `parallel` (default) encodes the media side by side on any workers, `serial` those of a
            kind one after the other on one.
        response_format: text, any JSON object, or JSON of a schema.
        tools, tool_choice, parallel_tool_calls: functions the model may, must or must not call.
        modalities: with `audio` in it the answer is read aloud while it is written, `audio` says how.
    """

    messages: list[ChatMessage]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = None
    execution: Literal["parallel", "serial"] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text", "audio"]], msgspec.Meta(min_length=1)] | None = None
    audio: SpeechWanted | None = None
