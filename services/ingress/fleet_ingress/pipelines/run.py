"""One request that passes several models: each step is a request of the fleet, begun as soon as its inputs are there.

The ingress that holds the connection starts the steps: it reads the tokens anyway, so what they stream can be spoken
sentence by sentence. A step is an ordinary request: it ends exactly once and outlives the worker that runs it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import structlog

from fleet_common.errors import (
    AdmissionRejectedError,
    DeadlineExceededError,
    DependencyError,
    EngineError,
    FleetError,
    InvalidInputError,
    OverloadError,
)
from fleet_contracts.audio import pcm_sample_rate_hz
from fleet_contracts.events import Usage
from fleet_ingress.api.audio import SpeechRequest
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.decode import decode_request
from fleet_ingress.api.images import ImageRequest
from fleet_ingress.context import Ingress
from fleet_ingress.core.audio_requests import parse_speech, parse_transcription
from fleet_ingress.core.image_answers import ShownPicture
from fleet_ingress.core.image_requests import parse_images
from fleet_ingress.core.media_stream import MediaDelta
from fleet_ingress.core.parsed import ParsedRequest, check_against_card, parse_chat
from fleet_ingress.core.pipeline_file import HISTORY, MESSAGES, Pipeline, Source, Step
from fleet_ingress.core.pipeline_requests import (
    Asked,
    Value,
    chat_body,
    image_body,
    picture_url,
    speech_body,
    transcription_form,
)
from fleet_ingress.core.request_state import End
from fleet_ingress.core.sentence_feed import SentenceFeed
from fleet_ingress.core.transcripts import Transcript
from fleet_ingress.errors import ApiError, from_failure, from_fleet_error
from fleet_ingress.live import LiveRequest
from fleet_ingress.pipelines.flow import Flow
from fleet_ingress.report import report_request
from fleet_ingress.routes.http import ClientGoneError
from fleet_ingress.served import served
from fleet_ingress.speech import wav_head

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Sentences given to voices before the first of them has been heard to its end.
_SENTENCES_AHEAD = 3
#: Pause before a step that was refused for load is tried again.
_RETRY_S = 0.5
_MAX_SEED = 2**31
_THREAD_BYTES = 128 << 10


class Audience(Protocol):
    """Who gets the outputs. Methods may raise ClientGoneError."""

    async def text(self, piece: str) -> None:
        """A piece of the text."""

    async def transcript(self, piece: str) -> None:
        """A piece of what is spoken."""

    async def audio(self, medium: MediaDelta) -> None:
        """Samples of speech."""

    async def picture(self, url: str) -> None:
        """A picture."""


@dataclass
class PipelineRun:
    """One run.

    Attributes:
        until_s: deadline, on the monotonic clock.
        is_named: the client asked for a pipeline: errors name the step.
        request_ids: by step, of the requests it was made of.
        usage: tokens of all steps so far.
        finish_reason: of the step that answers.
    """

    ingress: Ingress
    pipeline: Pipeline
    asked: Asked
    tenant: str
    until_s: float
    audience: Audience
    is_named: bool = True
    request_ids: dict[str, list[str]] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, completion_tokens=0))
    finish_reason: str = "stop"
    _texts: dict[str, Flow[str]] = field(default_factory=dict)
    _sounds: dict[str, Flow[MediaDelta]] = field(default_factory=dict)
    _lives: list[tuple[str, LiveRequest]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts = {step.id: Flow() for step in self.pipeline.steps}
        self._sounds = {step.id: Flow() for step in self.pipeline.steps}

    async def run(self) -> None:
        """Run all steps and show the outputs. Raises the error of the step that failed first; the others stop."""
        first: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for step in self.pipeline.steps:
                    group.create_task(self._step(step))
                for name, source in self.pipeline.outputs.items():
                    group.create_task(self._show(name, source))
        except* (ApiError, ClientGoneError) as errors:
            first = _first(errors)
        finally:
            self._close()
        if first is not None:
            raise first

    def _close(self) -> None:
        """Whatever runs still has nobody to answer to."""
        for operation, live in self._lives:
            self.ingress.dispatcher.abandon(live, "client_left")
            live.forget_deltas()
            report_request(self.ingress.metrics, operation, live)
        log.info("pipeline_finished", pipeline=self.pipeline.name, steps=self.request_ids)

    async def _step(self, step: Step) -> None:
        work = {"transcribe": self._transcribe, "chat": self._chat, "draw": self._draw, "speak": self._speak}
        try:
            await work[step.stage](step)
        except FleetError as err:
            raise self._named(step, from_fleet_error(err)) from err
        except ApiError as err:
            raise self._named(step, err) from err

    def _named(self, step: Step, error: ApiError) -> ApiError:
        """The error as the client of a pipeline reads it: fields of a step's own request are none of theirs."""
        if not self.is_named:
            return error
        body = msgspec.structs.replace(error.body, message=f"Step `{step.id}`: {error.body.message}", param=None)
        return ApiError(error.status, body, retry_after_s=error.retry_after_s)

    async def _values(self, step: Step) -> dict[str, Value]:
        """The inputs of a step, once all of them are there."""
        names = [name for name in step.inputs if name not in (MESSAGES, HISTORY)]
        return {name: await self._value(step.inputs[name]) for name in names}

    async def _value(self, source: Source) -> Value:
        return await self._texts[source.step].whole() if source.step else self.asked.inputs[source.name]

    async def _transcribe(self, step: Step) -> None:
        asked = parse_transcription(transcription_form(step, await self._values(step), self.asked))
        live = await self._submit(step, "transcription", asked.parsed, asked.root)
        media, end = await live.media_outcome()
        self._check(end, live)
        transcript = Transcript()
        transcript.add(media)
        if not transcript.text:
            raise InvalidInputError("No words were heard.", code="nothing_heard")
        await self._texts[step.id].add(transcript.text)
        await self._texts[step.id].end(Value(text=transcript.text))

    async def _chat(self, step: Step) -> None:
        is_answering = step.id == self.pipeline.answering_step
        values = await self._values(step)
        body = chat_body(step, values, self.asked, is_answering=is_answering)
        parsed = await _parsed(body, lambda: parse_chat(decode_request(body, ChatRequest), 1))
        live = await self._submit(step, "chat", parsed, body)
        flow, pieces, end = self._texts[step.id], list[str](), None
        while end is None:
            deltas, end = await live.take()
            for delta in deltas:
                if delta.text:
                    pieces.append(delta.text)
                    await flow.add(delta.text)
                if is_answering and delta.finish_reason is not None:
                    self.finish_reason = delta.finish_reason
        self._check(end, live)
        await flow.end(Value(text="".join(pieces)))

    async def _draw(self, step: Step) -> None:
        body = image_body(step, await self._values(step), self.asked)
        card, _ = served(self.ingress.view.catalog, step.model)
        parsed = parse_images(decode_request(body, ImageRequest), card, secrets.randbelow(_MAX_SEED))
        live = await self._submit(step, "image_generation", parsed, body)
        news, end = await live.pictures_outcome()
        self._check(end, live)
        files = [one.file for one in news if isinstance(one, ShownPicture) and one.is_final]
        if not files or parsed.pictures is None:
            raise EngineError("no picture was made")
        url = await asyncio.to_thread(picture_url, files[0], f"image/{parsed.pictures.format}")
        await self._texts[step.id].end(Value(images=(url,)))

    async def _speak(self, step: Step) -> None:
        """Sentences go to voices as they are written, and are heard in their order."""
        spoken: asyncio.Queue[LiveRequest | None] = asyncio.Queue(_SENTENCES_AHEAD)
        flow, samples, media_type = self._sounds[step.id], bytearray(), ""

        async def give() -> None:
            async for sentence in self._sentences(step):
                asked = parse_speech(decode_request(speech_body(step, sentence, self.asked), SpeechRequest))
                await spoken.put(await self._submit(step, "speech", asked.parsed, asked.root))
            await spoken.put(None)

        giving = asyncio.create_task(_outcome(give()))
        try:
            while (live := await _next(spoken, giving)) is not None:
                end = None
                while end is None:
                    media, end = await live.take_media()
                    for medium in media:
                        samples += medium.data
                        media_type = medium.media_type
                        await flow.add(medium)
                self._check(end, live)
        finally:
            giving.cancel()
        # A text without a word is no speech, and no fault of anybody's.
        wav = wav_head(pcm_sample_rate_hz(media_type), len(samples)) + bytes(samples) if samples else b""
        await flow.end(Value(audio=wav))
        await self._texts[step.id].end(Value(audio=wav))

    async def _sentences(self, step: Step) -> AsyncIterator[str]:
        feed = SentenceFeed()
        if "text" in step.streamed:
            async for piece in self._texts[step.inputs["text"].step].pieces():
                for sentence in feed.push(piece):
                    yield sentence
        else:
            for sentence in feed.push((await self._value(step.inputs["text"])).text):
                yield sentence
        for sentence in feed.end():
            yield sentence

    async def _show(self, name: str, source: Source) -> None:
        if name == "image":
            for url in (await self._value(source)).images:
                await self.audience.picture(url)
        elif name == "text":
            async for piece in self._texts[source.step].pieces():
                await self.audience.text(piece)
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._show_transcript(source))
                async for medium in self._sounds[source.step].pieces():
                    await self.audience.audio(medium)

    async def _show_transcript(self, source: Source) -> None:
        said = next(step for step in self.pipeline.steps if step.id == source.step).inputs["text"]
        if not said.step:
            await self.audience.transcript(self.asked.inputs[said.name].text)
            return
        async for piece in self._texts[said.step].pieces():
            await self.audience.transcript(piece)

    async def _submit(self, step: Step, operation: str, parsed: ParsedRequest, root: bytes) -> LiveRequest:
        """Start the request that a step is. Once one step has run, load is waited for: the work done must not be lost.

        Raises FleetError, ApiError.
        """
        card, parent = served(self.ingress.view.catalog, step.model)
        if parsed.pictures is None:
            check_against_card(parsed, card)
        wanted = parsed.on(parent) if parent else parsed
        clock = self.ingress.clock
        while True:
            left_s = self.until_s - clock.monotonic_s()
            if left_s <= 0:
                raise DeadlineExceededError("the pipeline took too long")
            try:
                live = await self.ingress.dispatcher.submit(wanted, root, self.tenant, left_s)
            except (AdmissionRejectedError, OverloadError, DependencyError) as err:
                if not self._lives or left_s <= _RETRY_S:
                    raise
                log.info("step_tried_again", pipeline=self.pipeline.name, step=step.id, code=err.code)
                await clock.sleep(_RETRY_S)
                continue
            self._lives.append((operation, live))
            self.request_ids.setdefault(step.id, []).append(live.request_id)
            return live

    def _check(self, end: End, live: LiveRequest) -> None:
        """Count what a step used. Raises ApiError when it failed."""
        if end.failure is not None:
            raise from_failure(end.failure, live.request_id, live.parsed.schema_param)
        if end.usage is None:
            raise EngineError("the step was given up")
        if live.parsed.pictures is None and live.parsed.audio is None:
            self.usage = Usage(
                prompt_tokens=self.usage.prompt_tokens + end.usage.prompt_tokens,
                completion_tokens=self.usage.completion_tokens + end.usage.completion_tokens,
                cached_tokens=self.usage.cached_tokens + end.usage.cached_tokens,
            )


async def _parsed(body: bytes, parse: Callable[[], ParsedRequest]) -> ParsedRequest:
    """Bodies of megabytes are read in a thread."""
    return parse() if len(body) < _THREAD_BYTES else await asyncio.to_thread(parse)


async def _outcome(work: Awaitable[None]) -> FleetError | ApiError | None:
    """The error as a value: who reads the queue raises it, after what came before it was heard."""
    try:
        await work
    except (FleetError, ApiError) as err:
        return err
    return None


async def _next(
    spoken: asyncio.Queue[LiveRequest | None], giving: asyncio.Task[FleetError | ApiError | None]
) -> LiveRequest | None:
    """The next sentence's request; None after the last. Raises what went wrong while sentences were given."""
    getting = asyncio.ensure_future(spoken.get())
    try:
        await asyncio.wait({getting, giving}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and (error := giving.result()) is not None:
            raise error
        return await getting
    finally:
        getting.cancel()


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Exception)
    return found
