"""Drive an engine that runs several steps in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence

import structlog

from fleet_common.errors import CancelledWorkError, EngineDeadError, EngineError, FleetError
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import EventLog
from fleet_common.stage.held import Held
from fleet_common.stage.inputs import open_inputs
from fleet_common.stage.outputs import keep_product, publish_next
from fleet_common.stage.port import BatchEngine, Product, StepItem
from fleet_common.stage.settle import Settler
from fleet_common.telemetry.tracing import stage_span
from fleet_contracts.embed import EmbedResult
from fleet_contracts.events import Usage
from fleet_contracts.preprocess import PreprocessResult

log = structlog.get_logger(__name__)

Result = Product | Exception

#: Runs a coroutine beside the caller, in the runner's task group.
Spawn = Callable[[Coroutine[None, None, None]], None]


class BatchDriver:
    """Runs composed batches: open, one engine call, then every item on its own.

    Up to `slots` items are in the engine at once, in batches of `engine.max_batch`; what follows a call (putting,
    publishing, settling) does not hold the engine up.
    """

    def __init__(self, context: StageContext, engine: BatchEngine, settler: Settler) -> None:
        self._context = context
        self._engine = engine
        self._settler = settler
        self.max_batch = max(1, engine.max_batch)
        self.num_lanes = max(1, context.identity.slots // self.max_batch)

    def running(self) -> int:
        """Items in the engine."""
        return self._context.stats.in_flight

    async def run(self, batch: Sequence[Held], spawn: Spawn) -> None:
        """Run a batch; returns when the engine is free again. `spawn` runs the rest of each item.

        Raises:
            EngineDeadError: the worker has to go.
        """
        logs = {held: EventLog(self._context, held) for held in batch}
        async with asyncio.TaskGroup() as group:
            openings = [group.create_task(self._open(held, logs[held], spawn)) for held in batch]
        opened = [held for held, opening in zip(batch, openings, strict=True) if opening.result()]
        if not opened:
            return
        for held in opened:
            held.batch_size = len(opened)
            await logs[held].started()
            held.pulse = logs[held].pulse
        results = await self._timed(opened)
        for held, result in zip(opened, results, strict=True):
            spawn(self._finish(held, result, logs[held]))

    async def _open(self, held: Held, events: EventLog, spawn: Spawn) -> bool:
        try:
            if held.is_over:
                raise CancelledWorkError("over before it started")
            await open_inputs(self._context, held, needs_root=self._engine.needs_root)
        except FleetError as error:
            spawn(self._settler.end_by(held, error, events))
            return False
        return True

    async def _timed(self, opened: Sequence[Held]) -> Sequence[Result]:
        context = self._context
        started_s = context.clock.monotonic_s()
        now_unix_s = context.clock.unix_s()
        for held in opened:
            held.started_unix_s = now_unix_s
            note_start(context, held)
        context.stats.started(len(opened), started_s)
        try:
            with contextlib.ExitStack() as spans:
                for held in opened:
                    spans.enter_context(stage_span("process", context.identity.stage, held.task.trace))
                return await self._call(opened)
        finally:
            ended_s = context.clock.monotonic_s()
            context.stats.stopped(len(opened), ended_s - started_s, ended_s)
            for held in opened:
                held.service_s = ended_s - started_s
                note_stop(context, held)

    async def _call(self, batch: Sequence[Held]) -> Sequence[Result]:
        """One engine call; a batch that raises is halved until each culprit is alone."""
        items = [StepItem(task=held.task, attempt=held.attempt, tensors=held.tensors, root=held.root) for held in batch]
        failure: Exception
        try:
            results = await self._engine.run(items)
        except EngineDeadError:
            raise
        except FleetError as error:
            failure = error
        except Exception as error:
            log.exception("engine_raised", num_items=len(items))
            failure = error
        else:
            if len(results) == len(items):
                return results
            failure = EngineError(f"the engine returned {len(results)} results for {len(items)} items")
        if len(batch) == 1:
            return [failure]
        log.warning("batch_split", num_items=len(batch), reason=type(failure).__name__)
        middle = len(batch) // 2
        return [*await self._call(batch[:middle]), *await self._call(batch[middle:])]

    async def _finish(self, held: Held, result: Result, events: EventLog) -> None:
        if held.is_over:
            await self._settler.end_by(held, CancelledWorkError("over while it ran"), events)
        elif isinstance(result, Product):
            await self._hand_on(held, result, events)
        else:
            await self._settler.end_by(held, result, events)

    async def _hand_on(self, held: Held, product: Product, events: EventLog) -> None:
        try:
            output = await keep_product(self._context, held, product)
            # First the row of the timeline: the next step may be done before this line is reached otherwise.
            await events.step_done("ok", product.media)
            await publish_next(self._context, held, output)
            if not held.task.plan.successors(held.task.step_id):
                await events.finished(_usage(product), (), outputs=output.tensors)
        except FleetError as error:
            await self._settler.end_by(held, error, events)
            return
        await self._settler.done(held)


def _usage(product: Product) -> Usage:
    """Of a request that ends here: the tokens of its prompt, where it has one."""
    result = product.result
    num_tokens = result.num_prompt_tokens if isinstance(result, PreprocessResult | EmbedResult) else 0
    return Usage(prompt_tokens=num_tokens, completion_tokens=0)


def note_start(context: StageContext, held: Held) -> None:
    """Count the wait of a step that starts now."""
    labels = {"stage": context.identity.stage.value, "model": held.task.step.model}
    wait_s = max(0.0, held.started_unix_s - held.task.enqueued_unix_s)
    context.metrics.queue_wait_seconds.labels(**labels).observe(wait_s)
    context.metrics.batch_size.labels(**labels).observe(held.batch_size)
    context.stats.waited(wait_s)


def note_stop(context: StageContext, held: Held) -> None:
    """Count the engine time of a step that stopped."""
    labels = {"stage": context.identity.stage.value, "model": held.task.step.model}
    context.metrics.service_seconds.labels(**labels).observe(held.service_s)
