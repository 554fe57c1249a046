"""A request as the rest of the ingress sees it, whatever route it came by; and the checks types cannot make."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import msgspec

from fleet_common.errors import InvalidInputError, UnsupportedModalityError
from fleet_contracts.audio import SpeakParams, TranscribeParams
from fleet_contracts.base import Modality, PriorityClass
from fleet_contracts.control import ModelCard
from fleet_contracts.decode import DecodeParams
from fleet_contracts.diffusion import DiffusionParams
from fleet_contracts.embed import EmbedParams
from fleet_contracts.preprocess import PreprocessParams
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.common import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    GenerationFields,
)
from fleet_ingress.api.completions import CompletionRequest
from fleet_ingress.api.embeddings import MAX_INPUTS, EmbeddingRequest
from fleet_ingress.api.tokenize import TokenizeRequest
from fleet_ingress.core.catalog import hears, speaks
from fleet_ingress.core.media_parts import MediaPart, check_media, check_messages
from fleet_ingress.core.tools import ToolUse, answer_rules

#: New tokens of a completion that does not say, as OpenAI has it.
DEFAULT_COMPLETION_TOKENS = 16

_FLEX = "flex"
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What was asked for.

    Attributes:
        route: `chat`, `completion` or `embedding`.
        media: pictures and audio of a chat, in order.
        echo_text: text put before the answer, "" for none.
        tools: how calls are found in the answer; None when there are none to find.
        schema_param: the field whose schema the answer obeys, "" for none.
        is_count: only the tokens of the prompt are asked for.
        is_serial: media of a kind are encoded one after the other by one worker, instead of side by side.
        pictures: what is to be drawn; None: text is wanted.
        embed: the vectors wanted; None: tokens are.
        is_base64: vectors are shown as base64 of little-endian float32.
        top_logprobs: alternatives to show per token; None = no logprobs.
        audio: what a step of audio is told, None for requests of text.
        response_format: of an answer about audio.
        granularities: what a transcript tells the times of: `segment`, `word`.
        parent: the model whose adapter was asked for, "" when a model was.
    """

    route: str
    model: str
    preprocess: PreprocessParams
    decode: DecodeParams
    priority_class: PriorityClass
    media: tuple[MediaPart, ...] = ()
    is_stream: bool = False
    include_usage: bool = False
    echo_text: str = ""
    tools: ToolUse | None = None
    schema_param: str = ""
    is_count: bool = False
    audio: TranscribeParams | SpeakParams | None = None
    response_format: str = ""
    granularities: tuple[str, ...] = ()
    is_serial: bool = False
    pictures: DiffusionParams | None = None
    embed: EmbedParams | None = None
    is_base64: bool = False
    parent: str = ""

    @property
    def served_model(self) -> str:
        """Whose workers run it; `model` is what the client called it."""
        return self.parent or self.model

    def on(self, parent: str) -> ParsedRequest:
        """The same for an adapter of `parent`, whose name the client gave as the model."""
        return replace(self, parent=parent, decode=msgspec.structs.replace(self.decode, adapter=self.model))

    @property
    def top_logprobs(self) -> int | None:
        return self.decode.logprobs


def parse_chat(request: ChatRequest, max_choices: int) -> ParsedRequest:
    """Check a chat request beyond its types. Raises InvalidInputError."""
    media = check_messages(request.messages)
    if request.audio is not None or "audio" in (request.modalities or ()):
        # Who makes spoken answers takes these fields off first.
        param = "modalities" if request.audio is None else "audio"
        raise InvalidInputError("A spoken answer needs `modalities` to hold `audio`.", param=param)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidInputError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidInputError(
            "`max_tokens` and `max_completion_tokens` say different things; send one.", param="max_completion_tokens"
        )
    max_tokens = max((limit for limit in limits if limit is not None), default=0)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    rules = answer_rules(request)
    return ParsedRequest(
        route="chat",
        model=request.model,
        preprocess=PreprocessParams(
            route="chat", max_new_tokens=max_tokens, max_pixels=request.max_pixels if request.max_pixels else 0
        ),
        decode=_decode_params(request, max_tokens, logprobs, max_choices, rules.schema),
        priority_class=_priority(request),
        media=media,
        is_stream=bool(request.stream),
        include_usage=_include_usage(request),
        tools=rules.tools,
        schema_param=rules.schema_param,
        is_serial=request.execution == "serial",
    )


def parse_completion(request: CompletionRequest, max_choices: int) -> ParsedRequest:
    """Check a completion request beyond its types. Raises InvalidInputError."""
    prompt = _prompt_text(request)
    if request.echo and request.logprobs is not None:
        raise InvalidInputError("`echo` together with `logprobs` is not supported yet.", param="echo")
    if request.echo and prompt is None:
        raise InvalidInputError("`echo` of a prompt of token ids is not supported yet.", param="echo")
    max_tokens = request.max_tokens or DEFAULT_COMPLETION_TOKENS
    return ParsedRequest(
        route="completion",
        model=request.model,
        preprocess=PreprocessParams(route="completion", max_new_tokens=max_tokens),
        decode=_decode_params(request, max_tokens, request.logprobs, max_choices),
        priority_class=_priority(request),
        is_stream=bool(request.stream),
        include_usage=_include_usage(request),
        echo_text=prompt if request.echo and prompt is not None else "",
    )


def parse_tokenize(request: TokenizeRequest) -> ParsedRequest:
    """Check a request to count tokens like the one whose tokens are counted. Raises InvalidInputError."""
    if request.messages is not None and request.prompt is not None:
        raise InvalidInputError("Send `messages` or `prompt`, not both.", param="prompt")
    if request.prompt is not None:
        parsed = parse_completion(CompletionRequest(model=request.model, prompt=request.prompt), 1)
    elif request.messages is not None:
        chat = ChatRequest(
            model=request.model, messages=request.messages, tools=request.tools, tool_choice=request.tool_choice
        )
        parsed = parse_chat(chat, 1)
    else:
        raise InvalidInputError("`messages` or `prompt` is required.", param="messages")
    preprocess = PreprocessParams(route=parsed.route)
    return replace(parsed, preprocess=preprocess, decode=DecodeParams(), tools=None, is_count=True)


def parse_embedding(request: EmbeddingRequest) -> ParsedRequest:
    """Check an embeddings request beyond its types. Raises InvalidInputError."""
    inputs = request.input
    if not inputs:
        raise InvalidInputError("`input` must not be empty.", param="input")
    if isinstance(inputs, list):
        if len({type(item) for item in inputs}) > 1:
            raise InvalidInputError("Texts and token ids must not be mixed in one list.", param="input")
        is_ids = isinstance(inputs[0], int)
        if not is_ids and len(inputs) > MAX_INPUTS:
            raise InvalidInputError(
                f"At most {MAX_INPUTS} inputs, this request has {len(inputs)}.", param="input", code="too_many_inputs"
            )
        for index, item in enumerate([] if is_ids else inputs):
            if not item:
                raise InvalidInputError("An input must not be empty.", param=f"input[{index}]")
    return ParsedRequest(
        route="embedding",
        model=request.model,
        preprocess=PreprocessParams(route="embedding"),
        decode=DecodeParams(),
        priority_class=PriorityClass(request.priority or PriorityClass.REALTIME),
        embed=EmbedParams(dimensions=request.dimensions or 0),
        is_base64=request.encoding_format == "base64",
    )


def _check_embedding_card(embed: EmbedParams, card: ModelCard) -> None:
    if Modality.EMBEDDING not in card.output_modalities:
        raise UnsupportedModalityError("This model makes no embeddings.", param="model")
    widths = (card.hidden_size, *card.embedding_dimensions)
    if embed.dimensions and embed.dimensions not in widths:
        raise InvalidInputError(
            f"This model's vectors have {' or '.join(map(str, widths))} dimensions, {embed.dimensions} were asked for.",
            param="dimensions",
        )


def check_against_card(parsed: ParsedRequest, card: ModelCard) -> None:
    """Whether the model can do it. Raises InvalidInputError or UnsupportedModalityError."""
    if parsed.audio is not None:
        check_audio(parsed.audio, card)
        return
    if parsed.embed is not None:
        _check_embedding_card(parsed.embed, card)
        return
    if Modality.TEXT not in card.input_modalities or Modality.TEXT not in card.output_modalities:
        raise UnsupportedModalityError("This model does not answer text with text.", param="model")
    check_media(parsed.media, card)
    max_tokens = parsed.decode.max_tokens
    if card.context_tokens and max_tokens > card.context_tokens:
        raise InvalidInputError(
            f"The model's context is {card.context_tokens} tokens, {max_tokens} were asked for in the answer alone.",
            param="max_tokens",
            code="context_length_exceeded",
        )


def check_audio(params: TranscribeParams | SpeakParams, card: ModelCard) -> None:
    """Whether the model hears that language, or has that voice. Raises RequestError."""
    if isinstance(params, TranscribeParams):
        if not hears(card):
            raise UnsupportedModalityError("This model does not transcribe audio.", param="model")
        if params.language and card.languages and params.language not in card.languages:
            raise InvalidInputError(
                f"`language` is one of: {', '.join(card.languages)}.", param="language", code="unknown_language"
            )
        return
    if not speaks(card):
        raise UnsupportedModalityError("This model does not speak.", param="model")
    if params.voice and card.voices and params.voice not in card.voices:
        raise InvalidInputError(f"`voice` is one of: {', '.join(card.voices)}.", param="voice", code="unknown_voice")


def _prompt_text(request: CompletionRequest) -> str | None:
    """The prompt; None when the client made its tokens itself."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    if not prompt:
        raise InvalidInputError("`prompt` must not be an empty list.", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return None
    raise InvalidInputError(
        "Several prompts are not supported yet; send one string, or one list of token ids.",
        param="prompt",
        code="unsupported_parameter",
    )


def _decode_params(
    request: GenerationFields, max_tokens: int, logprobs: int | None, max_choices: int, schema: str = ""
) -> DecodeParams:
    if request.store:
        raise InvalidInputError("`store` must be false: nothing is stored.", param="store")
    num_choices = request.n or 1
    if num_choices > max_choices:
        raise InvalidInputError(f"`n` may be at most {max_choices}.", param="n")
    min_tokens = request.min_tokens or 0
    if max_tokens and min_tokens > max_tokens:
        raise InvalidInputError("`min_tokens` is above `max_tokens`.", param="min_tokens")
    if request.stop_token_ids and len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidInputError(f"At most {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids")
    defaults = DecodeParams()
    return DecodeParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=num_choices,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or defaults.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        seed=request.seed,
        stop=_stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        logit_bias=_logit_bias(request),
        response_schema=schema,
    )


def _logit_bias(request: GenerationFields) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    if len(request.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidInputError(f"At most {MAX_LOGIT_BIAS} entries.", param="logit_bias")
    for token_id, bias in request.logit_bias.items():
        if not _TOKEN_ID.fullmatch(token_id) or int(token_id) >= 2**31:
            raise InvalidInputError("The keys of `logit_bias` are token ids.", param="logit_bias")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidInputError("A bias is from -100 to 100.", param="logit_bias")
    return {int(token_id): float(bias) for token_id, bias in request.logit_bias.items()}


def _stop_strings(request: GenerationFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    strings = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidInputError(f"At most {MAX_STOP_STRINGS} stop strings.", param="stop")
    if not all(0 < len(string) <= MAX_STOP_CHARS for string in strings):
        raise InvalidInputError(f"A stop string has 1 to {MAX_STOP_CHARS} characters.", param="stop")
    return strings


def _include_usage(request: GenerationFields) -> bool:
    if request.stream_options is None:
        return False
    if not request.stream:
        raise InvalidInputError("`stream_options` needs `stream` to be true.", param="stream_options")
    return bool(request.stream_options.include_usage)


def _priority(request: GenerationFields) -> PriorityClass:
    if request.priority is not None:
        return PriorityClass(request.priority)
    return PriorityClass.BATCH if request.service_tier == _FLEX else PriorityClass.REALTIME
