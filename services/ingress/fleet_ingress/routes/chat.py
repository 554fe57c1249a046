"""Chat completions: of one model, or put together by several: pipelines, and answers that are spoken."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp, HTTPScope, Receive, Send

from fleet_common.errors import FleetError, InvalidInputError, UnsupportedModalityError
from fleet_common.ids import new_request_id
from fleet_contracts.audio import SpeakParams, pcm_sample_rate_hz
from fleet_contracts.base import PriorityClass
from fleet_contracts.decode import DecodeParams
from fleet_contracts.models import ModelState
from fleet_contracts.preprocess import PreprocessParams
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.decode import decode_request
from fleet_ingress.context import TENANT_KEY, ingress_of
from fleet_ingress.core.catalog import Standing
from fleet_ingress.core.composed_answer import ComposedAnswer, ComposedHead
from fleet_ingress.core.media_stream import MediaDelta
from fleet_ingress.core.parsed import ParsedRequest, check_audio
from fleet_ingress.core.pipeline_file import Pipeline
from fleet_ingress.core.pipeline_requests import Asked, asked_of, spoken_chat
from fleet_ingress.core.pipeline_standing import speech_model, standing_of
from fleet_ingress.core.render import DONE_EVENT
from fleet_ingress.errors import ApiError, from_fleet_error, model_not_ready
from fleet_ingress.jobs.origin import class_and_timeout
from fleet_ingress.pipelines.run import PipelineRun
from fleet_ingress.routes.generation import CHAT, THREAD_BYTES, Exchange
from fleet_ingress.routes.http import ClientGoneError, close_after_answer, send_json
from fleet_ingress.served import served
from fleet_ingress.speech import SpeechWriter, open_writer

log = structlog.get_logger(__name__)


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(request: Request[None, None, State]) -> ASGIApp:
    """Answer a conversation, media included; in text, or aloud."""
    return ChatExchange(ingress_of(request.scope), CHAT).serve


class _Peek(msgspec.Struct):
    """What tells who answers."""

    model: Any = None
    modalities: Any = None


_peek = msgspec.json.Decoder(_Peek).decode


class ChatExchange(Exchange):
    """A chat: most are one request of the fleet, some are several."""

    async def _serve_body(self, scope: HTTPScope, body: bytes, receive: Receive, send: Send) -> None:
        if self._is_composed(body):
            await ComposedExchange(self._ingress, CHAT)._serve_body(scope, body, receive, send)
        else:
            await super()._serve_body(scope, body, receive, send)

    def _is_composed(self, body: bytes) -> bool:
        try:
            asked = _peek(body)
        except msgspec.DecodeError:
            # What is wrong with it, decoding will say.
            return False
        if isinstance(asked.modalities, list) and "audio" in asked.modalities:
            return True
        shelf = self._ingress.pipelines.shelf
        is_named = asked.model in shelf.pipelines() or asked.model in shelf.refused()
        # A model of that name was there for its clients before.
        return isinstance(asked.model, str) and is_named and self._ingress.view.catalog.standing(asked.model) is None


@dataclass(frozen=True, slots=True)
class _Composed:
    """A checked request and the pipeline for it."""

    request: ChatRequest
    pipeline: Pipeline
    asked: Asked
    is_named: bool


class ComposedExchange(Exchange):
    """A chat whose answer several models make."""

    _composed: _Composed | None = None
    _steps: PipelineRun | None = None
    _work: asyncio.Task[None] | None = None

    async def _read(self, scope: HTTPScope, body: bytes) -> tuple[ParsedRequest, bytes]:
        self._composed = composed = await self._compose(body)
        parsed = ParsedRequest(
            route="chat",
            model=composed.request.model,
            preprocess=PreprocessParams(route="chat"),
            decode=DecodeParams(),
            priority_class=PriorityClass(composed.asked.priority or PriorityClass.REALTIME),
            is_stream=bool(composed.request.stream),
            include_usage=bool(composed.request.stream_options and composed.request.stream_options.include_usage),
        )
        return parsed, body

    def _on_served_model(self, parsed: ParsedRequest) -> ParsedRequest:
        return parsed

    async def _compose(self, body: bytes) -> _Composed:
        """Check everything that can be checked before any step runs. Raises FleetError, ApiError."""
        is_large = len(body) >= THREAD_BYTES
        request = (
            await asyncio.to_thread(decode_request, body, ChatRequest)
            if is_large
            else decode_request(body, ChatRequest)
        )
        pipeline, is_named = self._pipeline(request)
        asked = await asyncio.to_thread(asked_of, request, pipeline) if is_large else asked_of(request, pipeline)
        self._check_voice(pipeline, asked)
        return _Composed(request, pipeline, asked, is_named)

    def _pipeline(self, request: ChatRequest) -> tuple[Pipeline, bool]:
        catalog, shelf = self._ingress.view.catalog, self._ingress.pipelines.shelf
        if catalog.standing(request.model) is None:
            found, refused = shelf.pipelines().get(request.model), shelf.refused().get(request.model)
            if found is not None and catalog.cards():
                standing = standing_of(*found, catalog)
                if standing.state is not ModelState.READY:
                    raise model_not_ready(standing)
                return found[0], True
            if refused is not None:
                raise model_not_ready(Standing(request.model, ModelState.FAILED, error=refused))
        served(catalog, request.model)
        speaking = speech_model(catalog)
        if speaking is None:
            raise UnsupportedModalityError("No model of this fleet speaks.", param="modalities")
        return spoken_chat(request.model, speaking), False

    def _check_voice(self, pipeline: Pipeline, asked: Asked) -> None:
        """Before the first step, and not when the first sentence is there."""
        for step in pipeline.steps:
            if step.stage == "speak" and asked.voice:
                card, _ = served(self._ingress.view.catalog, step.model)
                try:
                    check_audio(SpeakParams(voice=asked.voice), card)
                except InvalidInputError as err:
                    raise InvalidInputError(str(err), param="audio.voice", code=err.code) from err

    def _leave(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def _submit_and_answer(self, scope: HTTPScope, parsed: ParsedRequest, body: bytes, send: Send) -> None:
        # An answer for an Idempotency-Key is made by an exchange that read nothing.
        composed = self._composed or await self._compose(body)
        self._work = asyncio.create_task(self._run(scope, composed, send))
        if self._is_client_gone:
            self._work.cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            if self._is_client_gone and self._work.cancelled():
                self._ingress.metrics.cancelled_total.labels(self._route.operation).inc()
                raise ClientGoneError from None
            raise

    async def _run(self, scope: HTTPScope, composed: _Composed, send: Send) -> None:
        ingress, request, asked = self._ingress, composed.request, composed.asked
        head = ComposedHead(
            answer_id=f"{self._route.id_prefix}{new_request_id(ingress.dispatcher.ingress_id)}",
            model=request.model,
            created_unix_s=int(ingress.clock.unix_s()),
            has_text="text" in composed.pipeline.outputs,
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
        )
        # As a line of a job it has the time of one.
        _, timeout_s = class_and_timeout(PriorityClass.REALTIME, self._timeout_s(scope))
        answer = ComposedAnswer(head)
        hears = _Listener(self, answer, send, asked.audio_format, is_stream=bool(request.stream))
        self._steps = run = PipelineRun(
            ingress=ingress,
            pipeline=composed.pipeline,
            asked=asked,
            tenant=scope["state"][TENANT_KEY],
            until_s=ingress.clock.monotonic_s() + timeout_s,
            audience=hears,
            is_named=composed.is_named,
        )
        try:
            await run.run()
            await hears.end_of_audio()
        except (ApiError, FleetError) as err:
            await self._break_off(scope, err if isinstance(err, ApiError) else from_fleet_error(err), send)
            return
        answer.finish_reason = run.finish_reason
        if request.stream:
            await self._send_events(send, answer.last_events(run.usage) + DONE_EVENT)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await send_json(send, await asyncio.to_thread(answer.body, run.usage), self._id_headers())

    async def _break_off(self, scope: HTTPScope, error: ApiError, send: Send) -> None:
        """Raises the error when nothing was sent; else it is the last event, and there is no [DONE]."""
        if not self._has_begun:
            raise error
        close_after_answer(scope)
        await send({"type": "http.response.body", "body": b"data: " + error.envelope + b"\n\n", "more_body": False})

    async def show(self, send: Send, events: bytes) -> None:
        """Send events of a stream. Raises ClientGoneError."""
        await self._send_events(send, events)

    def _id_headers(self) -> list[tuple[bytes, bytes]]:
        """Which requests the steps are, as far as they have begun."""
        made = self._steps.request_ids.items() if self._steps is not None else ()
        shown = ", ".join(f"{step}={request_id}" for step, ids in made for request_id in ids)
        return [(b"x-fleet-step-request-ids", shown.encode())] if shown else []


class _Listener:
    """Turns outputs into the answer, and sends what can be sent now when it is streamed."""

    def __init__(
        self, exchange: ComposedExchange, answer: ComposedAnswer, send: Send, audio_format: str, *, is_stream: bool
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._send = send
        self._format = audio_format
        self._is_stream = is_stream
        self._writer: SpeechWriter | None = None
        self._samples = bytearray()
        self._rate_hz = 0
        self._lock = asyncio.Lock()

    async def text(self, piece: str) -> None:
        await self._show(self._answer.text(piece))

    async def transcript(self, piece: str) -> None:
        await self._show(self._answer.transcript(piece))

    async def picture(self, url: str) -> None:
        await self._show(self._answer.picture(url))

    async def audio(self, medium: MediaDelta) -> None:
        self._rate_hz = pcm_sample_rate_hz(medium.media_type)
        if not self._is_stream:
            self._samples += medium.data
            return
        if self._writer is None:
            self._writer = open_writer(self._format, self._rate_hz)
        await self._show_sound(await asyncio.to_thread(self._writer.add, medium.data))

    async def end_of_audio(self) -> None:
        """The rest of the file; a file that is not streamed is written now, when its length is known."""
        if self._writer is not None:
            await self._show_sound(await asyncio.to_thread(self._writer.end))
        elif self._rate_hz:
            writer = open_writer(self._format, self._rate_hz, len(self._samples))
            await self._show_sound(await asyncio.to_thread(lambda: writer.add(bytes(self._samples)) + writer.end()))

    async def _show_sound(self, data: bytes) -> None:
        if data:
            await self._show(self._answer.audio(data))

    async def _show(self, events: bytes) -> None:
        if self._is_stream:
            # Steps that end at the same time write on one connection.
            async with self._lock:
                await self._exchange.show(self._send, events)
