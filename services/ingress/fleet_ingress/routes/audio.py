"""Speech and transcripts: what the audio stages stream, as files and texts.

As with text, no response header leaves before there is something to hear or to read: bad input is a 4xx.
"""

from __future__ import annotations

import asyncio

import structlog
from litestar import Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp, HTTPScope, Send

from fleet_common.errors import EngineError
from fleet_contracts.audio import pcm_sample_rate_hz
from fleet_ingress.api.audio import SpeechRequest
from fleet_ingress.api.decode import decode_request
from fleet_ingress.api.form import is_form, read_form
from fleet_ingress.context import ingress_of
from fleet_ingress.core.audio_requests import AudioRequest, parse_speech, parse_transcription
from fleet_ingress.core.media_stream import MediaDelta
from fleet_ingress.core.parsed import ParsedRequest
from fleet_ingress.core.render import DONE_EVENT
from fleet_ingress.core.request_state import End
from fleet_ingress.core.transcripts import CONTENT_TYPES as TRANSCRIPT_TYPES
from fleet_ingress.core.transcripts import Transcript
from fleet_ingress.errors import ApiError, by_status, from_failure
from fleet_ingress.idempotency import fingerprint
from fleet_ingress.live import LiveRequest
from fleet_ingress.routes.generation import SSE_HEADERS, THREAD_BYTES, Exchange, Route
from fleet_ingress.routes.http import ClientGoneError, close_after_answer, header
from fleet_ingress.speech import CONTENT_TYPES as SPEECH_TYPES
from fleet_ingress.speech import SpeechWriter, open_writer

log = structlog.get_logger(__name__)


SPEECH = Route("speech", "")
TRANSCRIPTION = Route("transcription", "")


@post("/v1/audio/speech", status_code=200)
async def create_speech(request: Request[None, None, State]) -> ASGIApp:
    """Read a text aloud."""
    return SpeechExchange(ingress_of(request.scope), SPEECH).serve


@post("/v1/audio/transcriptions", status_code=200)
async def create_transcription(request: Request[None, None, State]) -> ASGIApp:
    """Write down what is said."""
    return TranscriptionExchange(ingress_of(request.scope), TRANSCRIPTION).serve


class _AudioExchange(Exchange):
    """What both have in common: the fleet gets one part of the body, the rest travels as parameters."""

    def _fingerprint(self, parsed: ParsedRequest, body: bytes) -> bytes:
        # Not the body itself: every form has another boundary.
        return fingerprint(self._route.operation, repr(parsed).encode() + b"\0" + body)

    def _failure(self, end: End, live: LiveRequest) -> ApiError | None:
        return None if end.failure is None else from_failure(end.failure, live.request_id)


class SpeechExchange(_AudioExchange):
    """One speech, sent sentence by sentence."""

    async def _read(self, scope: HTTPScope, body: bytes) -> tuple[ParsedRequest, bytes]:
        asked = parse_speech(decode_request(body, SpeechRequest))
        return asked.parsed, asked.root

    async def _answer(self, scope: HTTPScope, live: LiveRequest, send: Send) -> None:
        writer: SpeechWriter | None = None
        headers = [(b"content-type", SPEECH_TYPES[live.parsed.response_format])]
        while True:
            media, end = await live.take_media()
            if end is not None and (error := self._failure(end, live)) is not None:
                if not self._has_begun:
                    raise error
                # A file cannot say that it is not whole: the connection breaks off before its last chunk.
                log.warning("speech_broke_off", request_id=live.request_id, code=error.body.code)
                close_after_answer(scope)
                raise ClientGoneError
            if media:
                writer = writer or _writer_for(live.parsed.response_format, media)
                piece = await asyncio.to_thread(_written, writer, media)
                if piece:
                    await self._send_piece(send, piece, headers)
            if end is None:
                continue
            if end.usage is not None:
                if writer is None:
                    raise EngineError("nothing was said")
                await self._send_piece(send, await asyncio.to_thread(writer.end), headers)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            return


class TranscriptionExchange(_AudioExchange):
    """One transcript."""

    def _check_content_type(self, scope: HTTPScope) -> None:
        if not is_form(header(scope, b"content-type") or "") or header(scope, b"content-encoding") is not None:
            raise by_status(415, "Send a form: Content-Type: multipart/form-data.")

    async def _read(self, scope: HTTPScope, body: bytes) -> tuple[ParsedRequest, bytes]:
        content_type = header(scope, b"content-type") or ""

        def read() -> AudioRequest:
            return parse_transcription(read_form(body, content_type))

        asked = read() if len(body) < THREAD_BYTES else await asyncio.to_thread(read)
        return asked.parsed, asked.root

    async def _answer(self, scope: HTTPScope, live: LiveRequest, send: Send) -> None:
        if live.parsed.is_stream:
            await self._stream_transcript(scope, live, send)
            return
        transcript = Transcript()
        media, end = await live.media_outcome()
        if (error := self._failure(end, live)) is not None:
            raise error
        if end.usage is None:
            return
        transcript.add(media)
        parsed = live.parsed
        body = transcript.body(parsed.response_format, parsed.granularities)
        headers = [
            (b"content-type", TRANSCRIPT_TYPES[parsed.response_format]),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send_piece(send, body, headers)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream_transcript(self, scope: HTTPScope, live: LiveRequest, send: Send) -> None:
        transcript = Transcript()
        while True:
            media, end = await live.take_media()
            num_before = len(transcript.segments)
            for number, segment in enumerate(transcript.add(media), start=num_before):
                await self._send_piece(send, transcript.event(segment, is_first=number == 0), SSE_HEADERS)
            if end is None:
                continue
            if (error := self._failure(end, live)) is not None:
                if not self._has_begun:
                    raise error
                close_after_answer(scope)
                last = b"data: " + error.envelope + b"\n\n"
                await send({"type": "http.response.body", "body": last, "more_body": False})
            elif end.usage is not None:
                await self._send_piece(send, transcript.last_event() + DONE_EVENT, SSE_HEADERS)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            return


def _writer_for(response_format: str, media: list[MediaDelta]) -> SpeechWriter:
    """The length of a file is known only once all of it is there."""
    num_bytes = sum(len(medium.data) for medium in media) if media[-1].is_last else None
    return open_writer(response_format, pcm_sample_rate_hz(media[0].media_type), num_bytes)


def _written(writer: SpeechWriter, media: list[MediaDelta]) -> bytes:
    return b"".join(writer.add(medium.data) for medium in media)
