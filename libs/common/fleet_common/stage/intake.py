"""What happens to a delivery before it may wait for the engine: decode, outrank, drop, go solo."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleet_common.bus.port import WorkMessage
from fleet_common.errors import BusError, CancelledWorkError, FleetError
from fleet_common.stage.batch import Spawn
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import EventLog
from fleet_common.stage.held import Arrival, Held, HeldSteps, OverReason, judge
from fleet_common.stage.plan import wanted_tensors
from fleet_common.stage.settle import Settler
from fleet_contracts import codec, subjects
from fleet_contracts.events import Attempt
from fleet_contracts.work import StepTask

log = structlog.get_logger(__name__)


class Intake:
    """Takes deliveries in.

    Args:
        enqueue: the step may run: put it into the class queues.
        dequeue: it must not any more: take it out, False when it was not there (it runs).
    """

    def __init__(
        self,
        context: StageContext,
        held_steps: HeldSteps,
        settler: Settler,
        *,
        enqueue: Callable[[Held], None],
        dequeue: Callable[[Held], bool],
    ) -> None:
        self._context = context
        self._held_steps = held_steps
        self._settler = settler
        self._enqueue = enqueue
        self._dequeue = dequeue

    def accept(self, message: WorkMessage, spawn: Spawn) -> None:
        """Take one delivery; never blocks."""
        try:
            task = codec.decode_task(message.payload)
            step_stage = task.step.stage
            # Ids that fit no subject could be answered nowhere.
            subjects.event(task.events.ingress_id, task.request_id, task.events.nonce)
        except (codec.DecodeError, KeyError, ValueError):
            if is_of_another_release(message.payload):
                spawn(self._settler.pass_on(message))
            else:
                spawn(self._settler.dead_letter(message, "undecodable"))
            return
        if step_stage is not self._context.identity.stage:
            spawn(self._settler.dead_letter(message, "wrong_stage"))
            return
        if message.delivery > 1:
            self._context.metrics.redelivered_total.labels(stage=step_stage.value).inc()
        held = self._held_steps.get((task.request_id, task.step_id))
        if held is None and self._held_steps.is_finished(task):
            spawn(self._settler.ack_again(message, task.request_id))
            return
        arrival = judge(held, epoch=task.epoch, delivery=message.delivery)
        if arrival is Arrival.ADOPTED and held is not None:
            held.message = message
            held.is_doubtful = False
            log.info("delivery_adopted", request_id=task.request_id, step_id=task.step_id, delivery=message.delivery)
            return
        fresh = self._hold(message, task)
        if arrival is Arrival.OUTRANKED:
            self._take_outranked(fresh, held, spawn)
            return
        if arrival is Arrival.REPLACES and held is not None:
            self.end(held, OverReason.SUPERSEDED, spawn)
        self._held_steps.add(fresh)
        self._admit(fresh, spawn)

    def end(self, held: Held, reason: OverReason, spawn: Spawn) -> None:
        """Nobody waits for it any more: a queued step is settled now, a running one when its engine lets go."""
        if held.is_over:
            return
        held.end(reason)
        if self._dequeue(held):
            spawn(self._settler.end_by(held, CancelledWorkError(reason.value), EventLog(self._context, held)))

    def _hold(self, message: WorkMessage, task: StepTask) -> Held:
        identity = self._context.identity
        attempt = Attempt(
            request_id=task.request_id,
            step_id=task.step_id,
            stage=identity.stage,
            worker_id=identity.worker_id,
            epoch=task.epoch,
            delivery=message.delivery,
        )
        now_s = self._context.clock.monotonic_s()
        return Held(
            message=message,
            task=task,
            attempt=attempt,
            wanted=wanted_tensors(task),
            arrived_s=now_s,
            beaten_s=now_s,
            arrived_unix_s=self._context.clock.unix_s(),
        )

    def _take_outranked(self, fresh: Held, current: Held | None, spawn: Spawn) -> None:
        """A copy of older rank than the one we hold: its own message is acked, a delivery of ours is ignored."""
        if current is not None and current.task.epoch == fresh.task.epoch:
            return
        fresh.end(OverReason.SUPERSEDED)
        self._held_steps.add_outranked(fresh)
        spawn(self._settler.drop(fresh))

    def _admit(self, held: Held, spawn: Spawn) -> None:
        task = held.task
        view = self._context.view
        if view.is_cancelled(task.request_id):
            held.end(OverReason.CANCELLED)
        elif not task.is_job and view.is_ingress_gone(task.events.ingress_id):
            held.end(OverReason.GONE)
        elif self._context.clock.unix_s() >= task.deadline_unix_s:
            held.end(OverReason.LATE)
        if held.is_over:
            spawn(self._settler.end_by(held, CancelledWorkError("over on arrival"), EventLog(self._context, held)))
        elif held.message.delivery > 1:
            spawn(self._admit_redelivered(held))
        else:
            self._enqueue(held)

    async def _admit_redelivered(self, held: Held) -> None:
        """Only redelivered work pays for a look into the bucket: its cancel may have come before we were there."""
        if await self._has_tombstone(held):
            held.end(OverReason.CANCELLED)
        if held.is_over:
            await self._settler.end_by(held, CancelledWorkError("over on arrival"), EventLog(self._context, held))
        elif held.message.delivery >= self._context.identity.solo_from_delivery and not held.task.solo:
            try:
                await self._settler.go_solo(held)
            except FleetError as error:
                await self._settler.end_by(held, error, EventLog(self._context, held))
        else:
            self._enqueue(held)

    async def _has_tombstone(self, held: Held) -> bool:
        try:
            return await self._context.view.has_tombstone(held.task.request_id)
        except BusError as error:
            # The mirror has been asked already; the bucket only knows of cancels before this process started.
            log.info("tombstone_unknown", code=error.code)
            return False


def is_of_another_release(payload: bytes) -> bool:
    """Whether these bytes are a work item whose plan this release cannot read, from an ingress that can be told."""
    try:
        head = codec.decode_task_head(payload)
        subjects.event(head.events.ingress_id, head.request_id, head.events.nonce)
    except (codec.DecodeError, ValueError):
        return False
    try:
        codec.decode_task(payload)
    except codec.DecodeError:
        return True
    return False
