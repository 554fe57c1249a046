"""Drive an engine that runs steps side by side, each streaming tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from fleet_common.errors import BusError, CancelledWorkError, EngineDeadError, EngineError, FleetError
from fleet_common.stage.batch import Spawn, note_start, note_stop
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import EventLog, claim
from fleet_common.stage.held import Held, OverReason
from fleet_common.stage.inputs import open_inputs
from fleet_common.stage.pictures import PictureSink
from fleet_common.stage.port import StepItem, StreamEngine
from fleet_common.stage.settle import Settler
from fleet_common.telemetry.tracing import stage_span
from fleet_contracts.decode import TokenLogprob
from fleet_contracts.events import MAX_CHUNK_BYTES, ChoiceProgress, Chunk, Token, Usage

log = structlog.get_logger(__name__)

#: An engine that has not noticed by then that nobody waits is stopped from outside.
_STOP_GRACE_S = 1.0


@dataclass(slots=True)
class _Choice:
    num_tokens: int = 0
    num_chars: int = 0


class StreamSink(PictureSink):
    """Where the engine writes: numbers the tokens of each choice, and the media, and sends them as events."""

    def __init__(self, context: StageContext, held: Held, events: EventLog) -> None:
        super().__init__(context, held, events)
        self._progress: tuple[ChoiceProgress, ...] = ()
        self._choices: dict[int, _Choice] = {}
        self._num_chunks = 0

    def continue_from(self, progress: tuple[ChoiceProgress, ...]) -> None:
        """Start after what the client side has already."""
        self._progress = progress
        self._num_chunks = progress[0].num_chunks if progress else 0
        for number, choice in enumerate(progress):
            self._choices[number] = _Choice(num_tokens=len(choice.token_ids), num_chars=choice.num_text_chars)

    async def tokens(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
        stop_reason: str | None = None,
    ) -> None:
        if self.is_cancelled:
            raise CancelledWorkError("nobody waits for these tokens")
        state = self._choices.setdefault(choice, _Choice())
        event = Token(
            attempt=self._held.attempt,
            seq=self._events.next_seq,
            choice=choice,
            index=state.num_tokens,
            token_ids=tuple(token_ids),
            text=text,
            text_offset=state.num_chars,
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        state.num_tokens += len(token_ids)
        state.num_chars += len(text)
        self._context.metrics.output_tokens_total.labels(model=self._held.task.step.model).inc(len(token_ids))
        await self._events.send(event)

    async def chunk(self, media_type: str, data: bytes, *, is_last: bool = False) -> None:
        if self.is_cancelled:
            raise CancelledWorkError("nobody waits for this medium")
        pieces = [data[at : at + MAX_CHUNK_BYTES] for at in range(0, len(data), MAX_CHUNK_BYTES)] or [b""]
        for number, piece in enumerate(pieces):
            event = Chunk(
                attempt=self._held.attempt,
                seq=self._events.next_seq,
                media_type=media_type,
                data=piece,
                index=self._num_chunks,
                piece=number,
                num_pieces=len(pieces),
                is_last=is_last,
            )
            await self._events.send(event)
        self._num_chunks += 1

    @property
    def is_cancelled(self) -> bool:
        if not self._held.is_over and self._context.clock.unix_s() > self._held.task.deadline_unix_s:
            self._held.end(OverReason.LATE)
        return self._held.is_over

    def resume_point(self) -> Sequence[ChoiceProgress]:
        return self._progress

    def num_tokens(self) -> tuple[int, ...]:
        """Ids per choice, all attempts together."""
        count = max(self._choices, default=-1) + 1
        return tuple(self._choices[n].num_tokens if n in self._choices else 0 for n in range(count))

    @property
    def num_chunks(self) -> int:
        """Media, all attempts together."""
        return self._num_chunks


class StreamDriver:
    """Runs up to `engine.slots` steps at once, each as a batch of one."""

    max_batch = 1

    def __init__(self, context: StageContext, engine: StreamEngine, settler: Settler) -> None:
        self._context = context
        self._engine = engine
        self._settler = settler
        self.num_lanes = engine.slots
        self._streams: dict[Held, EventLog] = {}

    async def run(self, batch: Sequence[Held], spawn: Spawn) -> None:
        """Run one step to its end; the settling of it does not hold the slot. Raises EngineDeadError."""
        for held in batch:
            events = EventLog(self._context, held)
            self._streams[held] = events
            try:
                await self._run(held, events, spawn)
            except BaseException:
                self._streams.pop(held, None)
                raise

    async def resend_all(self) -> None:
        """The connection is back: what was published into the gap is lost, so send every kept event again."""
        try:
            for held, events in list(self._streams.items()):
                if not held.is_over:
                    await events.resend()
        except BusError as error:
            # Gone again: the next reconnect, or the ingress's own question, repeats it.
            log.info("resend_broken_off", code=error.code)

    async def claim_again(self) -> None:
        """This process was frozen: a stream that another attempt has taken over meanwhile stops here."""
        for held in list(self._streams):
            if held.is_over:
                continue
            with contextlib.suppress(FleetError):
                # A refusal ends `held`; without an answer the terminal event will tell.
                await claim(self._context, held)

    async def _run(self, held: Held, events: EventLog, spawn: Spawn) -> None:
        try:
            usage, sink = await self._generate(held, events)
        except EngineDeadError:
            raise
        except FleetError as error:
            spawn(self._end(held, error, events))
        else:
            spawn(self._finish(held, events, usage, sink))

    async def _generate(self, held: Held, events: EventLog) -> tuple[Usage, StreamSink]:
        context = self._context
        if held.is_over:
            raise CancelledWorkError("over before it started")
        await open_inputs(context, held, needs_root=self._engine.needs_root)
        sink = StreamSink(context, held, events)
        if held.attempt.delivery > 1 or held.attempt.epoch > 0:
            sink.continue_from((await claim(context, held)).choices)
        held.started_unix_s = context.clock.unix_s()
        held.batch_size = self._engine.running() + 1
        await events.started()
        held.pulse = events.pulse
        note_start(context, held)
        started_s = context.clock.monotonic_s()
        context.stats.started(1, started_s)
        item = StepItem(task=held.task, attempt=held.attempt, tensors=held.tensors, root=held.root)
        try:
            with stage_span("process", context.identity.stage, held.task.trace):
                return await self._isolated(item, sink, held), sink
        finally:
            ended_s = context.clock.monotonic_s()
            held.service_s = ended_s - started_s
            context.stats.stopped(1, held.service_s, ended_s)
            note_stop(context, held)

    async def _isolated(self, item: StepItem, sink: StreamSink, held: Held) -> Usage:
        """Run the engine, and stop it from outside when it overlooks that nobody waits."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(held.over.wait())
            run = group.create_task(self._guarded(item, sink))
            try:
                await asyncio.wait({run, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not run.done():
                    await self._let_stop(run)
            finally:
                watch.cancel()
                run.cancel()
        if run.cancelled():
            raise CancelledWorkError("the engine was stopped: nobody waits")
        outcome = run.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _let_stop(self, run: asyncio.Task[Usage | Exception]) -> None:
        async with asyncio.TaskGroup() as group:
            grace = group.create_task(self._context.clock.sleep(_STOP_GRACE_S))
            await asyncio.wait({run, grace}, return_when=asyncio.FIRST_COMPLETED)
            grace.cancel()

    async def _guarded(self, item: StepItem, sink: StreamSink) -> Usage | Exception:
        """The engine's result or its error, as a value: an error must not tear the task group down."""
        try:
            return await self._engine.run(item, sink)
        except FleetError as error:
            return error
        except Exception as error:
            log.exception("engine_raised", request_id=item.task.request_id)
            wrapped = EngineError("the engine raised")
            wrapped.__cause__ = error
            return wrapped

    async def _finish(self, held: Held, events: EventLog, usage: Usage, sink: StreamSink) -> None:
        try:
            await events.step_done("ok")
            await events.finished(usage, sink.num_tokens(), sink.num_chunks)
        except FleetError as error:
            await self._end(held, error, events)
            return
        self._streams.pop(held, None)
        if held.over_reason is OverReason.STALE:
            await self._settler.drop(held)
        else:
            await self._settler.done(held)

    async def _end(self, held: Held, error: Exception, events: EventLog) -> None:
        try:
            await self._settler.end_by(held, error, events)
        finally:
            self._streams.pop(held, None)
