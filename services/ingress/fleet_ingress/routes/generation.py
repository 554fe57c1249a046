"""Chat and text completions: body in, tokens out, whole or as server-sent events.

No response header leaves before the first token or the outcome, so that bad input found by any stage is a 4xx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import structlog
from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp, HTTPReceiveMessage, HTTPScope, Receive, Scope, Send

from fleet_common.errors import FleetError
from fleet_common.telemetry.tracing import request_span
from fleet_contracts.events import Usage
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.completions import CompletionRequest
from fleet_ingress.api.decode import decode_request
from fleet_ingress.api.embeddings import EmbeddingRequest
from fleet_ingress.api.tokenize import TokenizeRequest
from fleet_ingress.context import TENANT_KEY, Ingress, ingress_of
from fleet_ingress.core.parsed import (
    ParsedRequest,
    check_against_card,
    parse_chat,
    parse_completion,
    parse_embedding,
    parse_tokenize,
)
from fleet_ingress.core.render import (
    DONE_EVENT,
    AnswerHead,
    ChatRenderer,
    CompletionRenderer,
    CountRenderer,
    EmbeddingRenderer,
    Renderer,
)
from fleet_ingress.errors import ApiError, by_status, from_failure, from_fleet_error
from fleet_ingress.idempotency import Recording, fingerprint, idempotency_key
from fleet_ingress.live import LiveRequest
from fleet_ingress.report import report_request
from fleet_ingress.routes.http import (
    CLOSE_KEY,
    ClientGoneError,
    announced_bytes,
    check_content_type,
    close_after_answer,
    header,
    read_body,
    send_error,
    send_json,
)
from fleet_ingress.served import served

log = structlog.get_logger(__name__)

#: Bodies from here on are decoded in a thread: a picture of some megabytes must not hold up other streams.
THREAD_BYTES = 128 << 10

SSE_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Route:
    """What differs between the routes.

    Attributes:
        parse, renderer: None where the exchange reads the body, and makes the answer, in its own way.
    """

    operation: str
    id_prefix: str
    parse: Callable[[bytes, int], ParsedRequest] | None = None
    renderer: Callable[[AnswerHead], Renderer] | None = None


CHAT = Route(
    "chat",
    "chatcmpl-",
    lambda body, max_choices: parse_chat(decode_request(body, ChatRequest), max_choices),
    ChatRenderer,
)
COMPLETION = Route(
    "completion",
    "cmpl-",
    lambda body, max_choices: parse_completion(decode_request(body, CompletionRequest), max_choices),
    CompletionRenderer,
)

COUNT = Route("tokenize", "", lambda body, _: parse_tokenize(decode_request(body, TokenizeRequest)), CountRenderer)

EMBEDDING = Route(
    "embedding", "", lambda body, _: parse_embedding(decode_request(body, EmbeddingRequest)), EmbeddingRenderer
)


@post("/v1/completions", status_code=200)
async def create_completion(request: Request[None, None, State]) -> ASGIApp:
    """Continue a text."""
    return Exchange(ingress_of(request.scope), COMPLETION).serve


@post("/v1/tokenize", status_code=200)
async def count_tokens(request: Request[None, None, State]) -> ASGIApp:
    """Count the tokens of a prompt."""
    return Exchange(ingress_of(request.scope), COUNT).serve


@post("/v1/embeddings", status_code=200)
async def create_embeddings(request: Request[None, None, State]) -> ASGIApp:
    """Make a vector of each text."""
    return Exchange(ingress_of(request.scope), EMBEDDING).serve


class Exchange:
    """One HTTP exchange that becomes a request of the fleet."""

    def __init__(self, ingress: Ingress, route: Route) -> None:
        self._ingress = ingress
        self._route = route
        self._live: LiveRequest | None = None
        self._is_client_gone = False
        self._has_begun = False

    async def serve(self, any_scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this exchange."""
        scope = cast("HTTPScope", any_scope)
        try:
            self._check_content_type(scope)
            settings = self._ingress.settings
            num_bytes = announced_bytes(scope, settings.max_body_bytes)
            with self._ingress.gate.admit(num_bytes):
                body = await read_body(receive, settings.max_body_bytes, settings.body_timeout_s)
                await self._serve_body(scope, body, receive, send)
        except ApiError as err:
            await send_error(scope, receive, send, err)
        except ClientGoneError:
            log.info("client_left_early", route=self._route.operation)

    async def _serve_body(self, scope: HTTPScope, body: bytes, receive: Receive, send: Send) -> None:
        try:
            parsed, body = await self._read(scope, body)
            parsed = self._on_served_model(parsed)
        except FleetError as err:
            raise from_fleet_error(err) from err
        key = idempotency_key(scope)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(receive))
            try:
                if key is None:
                    await self._answer_or_error(scope, parsed, body, receive, send)
                else:
                    await self._answer_once(key, scope, parsed, body, send)
            except ApiError as err:
                await send_error(scope, receive, send, err)
            finally:
                watch.cancel()

    async def _answer_once(self, key: str, scope: HTTPScope, parsed: ParsedRequest, body: bytes, send: Send) -> None:
        """Join the request of that key, or be its first. Raises ApiError, before anything is sent."""
        answers, tenant = self._ingress.answers, scope["state"][TENANT_KEY]
        wanted = self._fingerprint(parsed, body)
        joined = answers.find(tenant, key, wanted)
        recording = joined or answers.start(tenant, key, wanted, lambda made: self._record(scope, parsed, body, made))
        try:
            await recording.replay(
                scope,
                send,
                self._ingress.settings.write_timeout_s,
                lambda: self._is_client_gone,
                is_first=joined is None,
            )
        except ClientGoneError:
            log.info("client_left", route=self._route.operation)

    async def _record(self, scope: HTTPScope, parsed: ParsedRequest, body: bytes, recording: Recording) -> None:
        """Make the answer on nobody's connection; it holds its own place at the gate."""
        state = {TENANT_KEY: scope["state"][TENANT_KEY], CLOSE_KEY: recording.break_off}
        alone = cast("HTTPScope", {**scope, "state": state})
        exchange = type(self)(self._ingress, self._route)
        try:
            with self._ingress.gate.admit(len(body)):
                await exchange._answer_or_error(alone, parsed, body, _nothing_more, recording.send)
        except ApiError as err:
            await send_error(alone, _nothing_more, recording.send, err)

    def _check_content_type(self, scope: HTTPScope) -> None:
        check_content_type(scope)

    async def _read(self, scope: HTTPScope, body: bytes) -> tuple[ParsedRequest, bytes]:
        """What is asked for, and what the fleet gets of the body. Raises FleetError."""
        return await self._parse(body), body

    def _fingerprint(self, parsed: ParsedRequest, body: bytes) -> bytes:
        """What has to be the same when an Idempotency-Key is used again."""
        return fingerprint(self._route.operation, body)

    async def _parse(self, body: bytes) -> ParsedRequest:
        max_choices = self._ingress.settings.max_choices
        assert self._route.parse is not None
        if len(body) < THREAD_BYTES:
            return self._route.parse(body, max_choices)
        return await asyncio.to_thread(self._route.parse, body, max_choices)

    def _on_served_model(self, parsed: ParsedRequest) -> ParsedRequest:
        """The request with the model that serves it. Raises ApiError, RequestError."""
        card, parent = served(self._ingress.view.catalog, parsed.model)
        check_against_card(parsed, card)
        return parsed.on(parent) if parent else parsed

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_client_gone = True
        self._leave()

    def _leave(self) -> None:
        """The client is gone: what runs for it stops."""
        if self._live is not None:
            self._abandon(self._live)

    def _abandon(self, live: LiveRequest) -> None:
        if live.state.end is None:
            self._ingress.metrics.cancelled_total.labels(self._route.operation).inc()
            self._ingress.dispatcher.abandon(live, "client_left")

    async def _answer_or_error(
        self, scope: HTTPScope, parsed: ParsedRequest, body: bytes, receive: Receive, send: Send
    ) -> None:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        try:
            with request_span(self._route.operation, parsed.model, headers):
                await self._submit_and_answer(scope, parsed, body, send)
        except ClientGoneError:
            log.info("client_left", route=self._route.operation)
        except ApiError as err:
            await send_error(scope, receive, send, err, self._id_headers())
        except FleetError as err:
            log.warning("request_refused", route=self._route.operation, code=err.code, reason=str(err))
            await send_error(scope, receive, send, from_fleet_error(err), self._id_headers())

    async def _submit_and_answer(self, scope: HTTPScope, parsed: ParsedRequest, body: bytes, send: Send) -> None:
        tenant = scope["state"][TENANT_KEY]
        live = await self._ingress.dispatcher.submit(parsed, body, tenant, self._timeout_s(scope))
        self._live = live
        try:
            if self._is_client_gone:
                self._abandon(live)
            await self._answer(scope, live, send)
        finally:
            self._abandon(live)
            live.forget_deltas()
            report_request(self._ingress.metrics, self._route.operation, live)

    def _timeout_s(self, scope: HTTPScope) -> float:
        """The operator's deadline, or an earlier one the client names. Raises ApiError."""
        limit_s = self._ingress.settings.request_timeout_s
        text = header(scope, b"x-fleet-timeout-s")
        if text is None:
            return limit_s
        try:
            wanted_s = float(text)
        except ValueError as err:
            raise by_status(400, "X-Fleet-Timeout-S is no number of seconds.") from err
        if not 0.0 < wanted_s <= limit_s:
            raise by_status(400, f"X-Fleet-Timeout-S must be above 0 and at most {limit_s:g}.")
        return wanted_s

    async def _answer(self, scope: HTTPScope, live: LiveRequest, send: Send) -> None:
        parsed = live.parsed
        assert self._route.renderer is not None
        renderer = self._route.renderer(
            AnswerHead(
                answer_id=f"{self._route.id_prefix}{live.request_id}",
                model=parsed.model,
                created_unix_s=int(live.created_unix_s),
                num_choices=parsed.decode.n,
                include_usage=parsed.include_usage,
                top_logprobs=parsed.top_logprobs,
                echo_text=parsed.echo_text,
                tools=parsed.tools,
                is_base64=parsed.is_base64,
            )
        )
        if parsed.is_stream:
            await self._stream(scope, live, renderer, send)
        else:
            await self._whole(live, renderer, send)

    async def _whole(self, live: LiveRequest, renderer: Renderer, send: Send) -> None:
        deltas, end = await live.outcome()
        if end.failure is not None:
            raise from_failure(end.failure, live.request_id, live.parsed.schema_param)
        if end.usage is not None:
            renderer.collect(deltas)
            renderer.attach(live.outputs)
            # Thousands of vectors as text take a while: other streams go on meanwhile.
            is_large = sum(array.nbytes for array in live.outputs.values()) >= THREAD_BYTES
            body = await asyncio.to_thread(renderer.body, end.usage) if is_large else renderer.body(end.usage)
            await send_json(send, body, self._id_headers())

    async def _stream(self, scope: HTTPScope, live: LiveRequest, renderer: Renderer, send: Send) -> None:
        while True:
            deltas, end = await live.take()
            events = renderer.events(deltas)
            if events:
                await self._send_events(send, events)
            if end is None:
                continue
            if end.usage is not None:
                await self._end_stream(live, renderer, end.usage, send)
            elif end.failure is not None:
                error = from_failure(end.failure, live.request_id, live.parsed.schema_param)
                if not self._has_begun:
                    raise error
                # One error event and no [DONE]: clients must not take what they have for a whole answer.
                close_after_answer(scope)
                await send(
                    {"type": "http.response.body", "body": b"data: " + error.envelope + b"\n\n", "more_body": False}
                )
            return

    async def _send_events(self, send: Send, events: bytes) -> None:
        await self._send_piece(send, events, SSE_HEADERS)

    async def _send_piece(self, send: Send, piece: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Part of a streamed answer; the first one brings the headers. Raises ClientGoneError."""
        try:
            async with asyncio.timeout(self._ingress.settings.write_timeout_s):
                if not self._has_begun:
                    self._has_begun = True
                    whole = [*headers, *self._id_headers()]
                    await send({"type": "http.response.start", "status": 200, "headers": whole})
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError as err:
            raise ClientGoneError from err

    async def _end_stream(self, live: LiveRequest, renderer: Renderer, usage: Usage, send: Send) -> None:
        last = renderer.usage_event(usage) if live.parsed.include_usage else b""
        await self._send_events(send, last + DONE_EVENT)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _id_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-fleet-request-id", self._live.request_id.encode())] if self._live is not None else []


async def _nothing_more() -> HTTPReceiveMessage:
    """ASGI `receive` where the body was read and nobody can leave."""
    return {"type": "http.request", "body": b"", "more_body": False}
