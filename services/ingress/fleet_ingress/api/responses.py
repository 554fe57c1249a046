"""What the generation routes and `/v1/models` answer, in OpenAI's shapes."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens`: of the prompt, found in the KV cache."""

    cached_tokens: int = 0


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class AlternativeLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate; `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token and its alternatives, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per token of the text that comes with it."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is JSON text, made by the model: check it before use."""

    name: str
    arguments: str


class MadeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call the model wants made; the result goes back in a `tool` message with its `id`."""

    id: str
    type: str = "function"
    function: CalledFunction


class SpokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer read aloud: a file in base64, and what it says. Nothing is kept: `expires_at` is when it was made."""

    id: str
    data: str
    expires_at: int
    transcript: str


class PictureUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A picture as a `data:` URL."""

    url: str


class MadePicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture a pipeline made, in the shape in which chats take pictures."""

    image_url: PictureUrl
    type: str = "image_url"


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn. `content` is null when there are only calls, or only speech."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[MadeCall] | UnsetType = UNSET
    audio: SpokenAnswer | UnsetType = UNSET
    images: list[MadePicture] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason`: `stop`, `length` or `tool_calls`."""

    index: int
    message: ChatAnswer
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReport
    system_fingerprint: str | None = None


class CalledFunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The name once, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class MadeCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of call number `index`; the first piece of a call has `id`, `type` and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunctionDelta


class SpokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the file, or of what it says; the last one has `expires_at`."""

    id: str
    data: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new; the first delta of a choice has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[MadeCallDelta] | UnsetType = UNSET
    audio: SpokenDelta | UnsetType = UNSET
    images: list[MadePicture] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`finish_reason` is null until the last delta of the choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One `data:` event of a stream. `usage` only with `stream_options.include_usage`: null but in the last chunk."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: UsageReport | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry per token; `text_offset` in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text, or in a stream the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole text completion, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: UsageReport | UnsetType | None = UNSET


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model or an adapter. `context_tokens` is prompt + output, 0 when unknown.

    Attributes:
        state: `ready`, `loading`, or `failed` with its `error`.
        parent: the model an adapter belongs to.
        voices: names a model speaks with.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "omnifleet"
    input_modalities: list[str]
    output_modalities: list[str]
    context_tokens: int
    max_images: int
    max_audios: int
    voices: list[str]
    state: str = "ready"
    error: str | None = None
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    object: str = "list"
    data: list[ModelReport]


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """`status`: `live` or `ready`."""

    status: str
