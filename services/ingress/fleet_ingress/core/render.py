"""From deltas to OpenAI's answers, for both routes: a whole JSON body, or the `data:` events of a stream."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from fleet_common.tensors.port import Array
from fleet_contracts.decode import TokenAlternative, TokenLogprob
from fleet_contracts.events import Usage
from fleet_ingress.api import responses as api
from fleet_ingress.api.embeddings import Embedding, EmbeddingList, EmbeddingUsage
from fleet_ingress.api.tokenize import TokenCountReport
from fleet_ingress.core.token_stream import Delta
from fleet_ingress.core.tool_calls import CallPiece, Piece, TextPiece, make_shaper
from fleet_ingress.core.tools import ToolUse

#: What "impossible" is shown as: JSON knows no -inf.
MIN_LOGPROB = -9999.0

DONE_EVENT = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every answer and chunk of one request carries.

    Attributes:
        answer_id: `chatcmpl-<request id>` or `cmpl-<request id>`.
        top_logprobs: alternatives to show per token; None = no logprobs.
        echo_text: text put before every choice.
        tools: how calls are found in the text.
        is_base64: vectors are shown as base64.
    """

    answer_id: str
    model: str
    created_unix_s: int
    num_choices: int
    include_usage: bool = False
    top_logprobs: int | None = None
    echo_text: str = ""
    tools: ToolUse | None = None
    is_base64: bool = False


class Renderer(Protocol):
    """Makes the answer of one request; deltas are given in order, each once."""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """`data:` events for new deltas; b"" when they show nothing (text held back)."""

    def usage_event(self, usage: Usage) -> bytes:
        """The last event but `[DONE]` of a stream that asked for usage."""

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Keep deltas for `body`."""

    def attach(self, outputs: Mapping[str, Array]) -> None:
        """Keep tensors that are the answer for `body`."""

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""


@dataclass(slots=True)
class _Collected:
    """One choice so far. `pending_logprobs`: of tokens whose text is held back."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    has_begun: bool = False
    num_chars: int = 0


class _Base:
    """What both renderers do alike."""

    def __init__(self, head: AnswerHead) -> None:
        self.head = head
        self.choices = [_Collected() for _ in range(head.num_choices)]

    def collect(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            choice = self.choices[delta.choice]
            choice.texts.append(delta.text)
            choice.logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def attach(self, outputs: Mapping[str, Array]) -> None:
        """Answers in tokens have none."""

    def _shows(self, delta: Delta, *, is_visible: bool) -> list[TokenLogprob] | None:
        """Log probabilities to show with this delta; None when there is nothing to show yet."""
        choice = self.choices[delta.choice]
        choice.pending_logprobs.extend(delta.logprobs)
        if not is_visible and delta.finish_reason is None:
            return None
        shown, choice.pending_logprobs = choice.pending_logprobs, []
        return shown

    def _usage_field(self) -> msgspec.UnsetType | None:
        return None if self.head.include_usage else msgspec.UNSET


class ChatRenderer(_Base):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._shapers = [make_shaper(head.tools) for _ in range(head.num_choices)]

    def events(self, deltas: Iterable[Delta]) -> bytes:
        return b"".join(self._events_of(delta) for delta in deltas)

    def _events_of(self, delta: Delta) -> bytes:
        shaper = self._shapers[delta.choice]
        pieces = shaper.push(delta.text)
        if delta.finish_reason is not None:
            pieces += shaper.finish()
        shown = self._shows(delta, is_visible=bool(pieces))
        if shown is None:
            return b""
        if shown and not pieces:
            pieces = [TextPiece("")]
        out: list[bytes] = []
        choice = self.choices[delta.choice]
        if not choice.has_begun:
            choice.has_begun = True
            content = None if pieces and isinstance(pieces[0], CallPiece) else ""
            out.append(self._event(delta.choice, api.ChatDelta(role="assistant", content=content)))
        for piece in pieces:
            out.append(self._event(delta.choice, self._delta(delta.choice, piece), self._logprobs(shown)))
            shown = []
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, shaper.num_calls)
            out.append(self._event(delta.choice, api.ChatDelta(), finish_reason=reason))
        return b"".join(out)

    def _delta(self, choice: int, piece: Piece) -> api.ChatDelta:
        if isinstance(piece, TextPiece):
            return api.ChatDelta(content=piece.text)
        call = api.MadeCallDelta(index=piece.index, function=api.CalledFunctionDelta(arguments=piece.arguments))
        if piece.name is not None:
            call = api.MadeCallDelta(
                index=piece.index,
                id=self._call_id(choice, piece.index),
                type="function",
                function=api.CalledFunctionDelta(name=piece.name, arguments=piece.arguments),
            )
        return api.ChatDelta(tool_calls=[call])

    def usage_event(self, usage: Usage) -> bytes:
        return _sse(self._chunk([], usage_report(usage)))

    def body(self, usage: Usage) -> bytes:
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)]
        head = self.head
        return _encode(
            api.ChatCompletion(
                id=head.answer_id,
                created=head.created_unix_s,
                model=head.model,
                choices=choices,
                usage=usage_report(usage),
            )
        )

    def _whole_choice(self, index: int, choice: _Collected) -> api.ChatChoice:
        shaper = make_shaper(self.head.tools)
        text, calls = "", dict[int, api.CalledFunction]()
        for piece in [*shaper.push("".join(choice.texts)), *shaper.finish()]:
            if isinstance(piece, TextPiece):
                text += piece.text
            else:
                calls[piece.index] = api.CalledFunction(name=piece.name or "", arguments=piece.arguments)
        made = [api.MadeCall(id=self._call_id(index, call), function=calls[call]) for call in calls]
        return api.ChatChoice(
            index=index,
            message=api.ChatAnswer(
                content=None if made and not text else text, tool_calls=made if made else msgspec.UNSET
            ),
            finish_reason=_finish_reason(choice.finish_reason or "stop", len(made)),
            logprobs=self._logprobs(choice.logprobs),
            stop_reason=choice.stop_reason,
        )

    def _call_id(self, choice: int, call: int) -> str:
        """The same whenever the same answer is made again."""
        name = f"{self.head.answer_id}:{choice}:{call}"
        return f"call_{hashlib.sha256(name.encode()).hexdigest()[:24]}"

    def _event(
        self,
        index: int,
        delta: api.ChatDelta,
        logprobs: api.ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = api.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return _sse(self._chunk([choice], self._usage_field()))

    def _chunk(
        self, choices: list[api.ChatChunkChoice], usage: api.UsageReport | msgspec.UnsetType | None
    ) -> api.ChatChunk:
        head = self.head
        return api.ChatChunk(
            id=head.answer_id, created=head.created_unix_s, model=head.model, choices=choices, usage=usage
        )

    def _logprobs(self, logprobs: list[TokenLogprob]) -> api.ChatLogprobs | None:
        limit = self.head.top_logprobs
        if limit is None:
            return None
        return api.ChatLogprobs(
            content=[
                api.ContentLogprob(
                    token=item.chosen.token,
                    logprob=max(MIN_LOGPROB, item.chosen.logprob),
                    bytes=list(item.chosen.bytes_),
                    top_logprobs=[
                        api.AlternativeLogprob(
                            token=top.token, logprob=max(MIN_LOGPROB, top.logprob), bytes=list(top.bytes_)
                        )
                        for top in item.top[:limit]
                    ],
                )
                for item in logprobs
            ]
        )


class CompletionRenderer(_Base):
    """`text_completion`, whole and in pieces."""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            shown = self._shows(delta, is_visible=bool(delta.text))
            if shown is None:
                continue
            choice = self.choices[delta.choice]
            text = delta.text if choice.has_begun else self.head.echo_text + delta.text
            choice.has_begun = True
            piece = api.CompletionChoice(
                index=delta.choice,
                text=text,
                logprobs=self._logprobs(shown, choice.num_chars),
                finish_reason=delta.finish_reason,
            )
            choice.num_chars += sum(len(item.chosen.token) for item in shown)
            out.append(_sse(self._completion([piece], self._usage_field())))
        return b"".join(out)

    def usage_event(self, usage: Usage) -> bytes:
        return _sse(self._completion([], usage_report(usage)))

    def body(self, usage: Usage) -> bytes:
        choices = [
            api.CompletionChoice(
                index=index,
                text=self.head.echo_text + "".join(choice.texts),
                logprobs=self._logprobs(choice.logprobs, 0),
                finish_reason=choice.finish_reason or "stop",
            )
            for index, choice in enumerate(self.choices)
        ]
        return _encode(self._completion(choices, usage_report(usage)))

    def _completion(
        self, choices: list[api.CompletionChoice], usage: api.UsageReport | msgspec.UnsetType | None
    ) -> api.Completion:
        head = self.head
        return api.Completion(
            id=head.answer_id, created=head.created_unix_s, model=head.model, choices=choices, usage=usage
        )

    def _logprobs(self, logprobs: list[TokenLogprob], first_offset: int) -> api.CompletionLogprobs | None:
        limit = self.head.top_logprobs
        if limit is None:
            return None
        offsets, offset = [], first_offset
        for item in logprobs:
            offsets.append(offset)
            offset += len(item.chosen.token)
        return api.CompletionLogprobs(
            tokens=[item.chosen.token for item in logprobs],
            token_logprobs=[max(MIN_LOGPROB, item.chosen.logprob) for item in logprobs],
            top_logprobs=[_by_token(item, limit) for item in logprobs],
            text_offset=offsets,
        )


class CountRenderer(_Base):
    """The tokens of the prompt; never streamed."""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        raise AssertionError("a count is no stream")

    def usage_event(self, usage: Usage) -> bytes:
        raise AssertionError("a count is no stream")

    def body(self, usage: Usage) -> bytes:
        return _encode(TokenCountReport(model=self.head.model, count=usage.prompt_tokens))


class EmbeddingRenderer(_Base):
    """One vector per input, in order; never streamed."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._vectors: Array = np.zeros((0, 0), dtype=np.float32)

    def attach(self, outputs: Mapping[str, Array]) -> None:
        self._vectors = outputs["vectors"]

    def events(self, deltas: Iterable[Delta]) -> bytes:
        raise AssertionError("embeddings are no stream")

    def usage_event(self, usage: Usage) -> bytes:
        raise AssertionError("embeddings are no stream")

    def body(self, usage: Usage) -> bytes:
        return _encode(
            EmbeddingList(
                data=[Embedding(index=index, embedding=self._shown(row)) for index, row in enumerate(self._vectors)],
                model=self.head.model,
                usage=EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens),
            )
        )

    def _shown(self, vector: Array) -> list[float] | str:
        if self.head.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers


def _finish_reason(reason: str, num_calls: int) -> str:
    return "tool_calls" if reason == "stop" and num_calls else reason


def usage_report(usage: Usage) -> api.UsageReport:
    """OpenAI's shape of the token counts."""
    return api.UsageReport(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=api.PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def _alternative(top: TokenAlternative) -> api.AlternativeLogprob:
    return api.AlternativeLogprob(token=top.token, logprob=max(MIN_LOGPROB, top.logprob), bytes=list(top.bytes_))


def _by_token(item: TokenLogprob, limit: int) -> dict[str, float]:
    # OpenAI adds the chosen token to the alternatives when it is not among them.
    shown = {top.token: max(MIN_LOGPROB, top.logprob) for top in item.top[:limit]}
    return {item.chosen.token: max(MIN_LOGPROB, item.chosen.logprob), **shown}


def _sse(message: msgspec.Struct) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"
