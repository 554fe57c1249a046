"""The only place where a delivery is acked, nak'd or dead-lettered: every attempt ends in exactly one of these."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleet_common.bus.port import WorkMessage
from fleet_common.errors import (
    BusError,
    CancelledWorkError,
    DeadlineExceededError,
    DependencyError,
    EngineDeadError,
    EngineOutOfMemoryError,
    FleetError,
    OverloadError,
    RequestError,
    TensorNotFoundError,
)
from fleet_common.failures import failure_of
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import EventLog
from fleet_common.stage.held import Held, HeldSteps, OverReason
from fleet_common.stage.inputs import InputsLostError, repair
from fleet_common.stage.outputs import release_inputs
from fleet_common.stage.plan import moved_copy, solo_copy
from fleet_common.stage.publish import MESSAGE_GRACE_S, publish_task
from fleet_contracts import codec, subjects
from fleet_contracts.base import StepId
from fleet_contracts.work import DeadLetter

log = structlog.get_logger(__name__)

#: Delivery from which running out of memory alone is the request's own failure.
_OUT_OF_MEMORY_DELIVERY = 3
_OUT_OF_MEMORY_DELAY_S = 0.25
_RETRY_DELAY_S = 0.1
#: Before work of a later release is offered to another worker; `max_deliver` of these and its client is told.
_PASS_ON_DELAY_S = 0.5
#: An ack is tried this long: without it the broker delivers again, and that attempt finds the work done.
_ACK_PATIENCE_S = 30.0


class Settler:
    """Ends attempts.

    Args:
        on_settled: told after every settled attempt: there is room for more.
        run_again: puts an attempt back into the local queues after a while (a dependency of its engine was out).
    """

    def __init__(
        self,
        context: StageContext,
        held_steps: HeldSteps,
        on_settled: Callable[[], None],
        run_again: Callable[[Held], None],
    ) -> None:
        self._context = context
        self._held_steps = held_steps
        self._on_settled = on_settled
        self._run_again = run_again

    async def done(self, held: Held, outcome: str = "ok", *, is_fault: bool = False) -> None:
        """Finished, and everything that follows is published: ack, then free what nobody reads again.

        Args:
            is_fault: the worker's own failure, for placement to see; bad input and missed deadlines are none.
        """
        held.close_inputs()
        self._held_steps.finish(held)
        await self._ack(held)
        await release_inputs(self._context, held)
        if is_fault:
            self._context.stats.failed_total += 1
        else:
            self._context.stats.completed_total += 1
        self._forget(held, outcome)

    async def fail(self, held: Held, error: BaseException, events: EventLog) -> None:
        """The request ends here with an error that the client is told, once."""
        failure = failure_of(error, held.task.request_id)
        log.info(
            "step_failed", request_id=held.task.request_id, step_id=held.task.step_id, code=failure.code, why=str(error)
        )
        held.close_inputs()
        try:
            await events.step_done(failure.code)
            await events.failed(failure)
        except DeadlineExceededError as error_late:
            # The ingress has told the client by its own timer.
            log.info("failure_unanswered", request_id=held.task.request_id, reason=str(error_late))
        except CancelledWorkError:
            # Whatever was to be said, nobody is there to hear it.
            held.end(OverReason.CANCELLED)
            await self.drop(held)
            return
        if held.over_reason is OverReason.STALE:
            await self.drop(held)
        else:
            await self.done(held, failure.code, is_fault=not isinstance(error, RequestError | OverloadError))

    async def drop(self, held: Held) -> None:
        """Nobody waits for this attempt: ack without a word.

        An attempt that another delivery of the same message has outranked is forgotten instead: its ack would take
        the message away from the one that runs it now.
        """
        reason = held.over_reason or OverReason.CANCELLED
        held.close_inputs()
        other = self._held_steps.get(held.key)
        is_same_message = other is not None and other is not held and other.task.epoch == held.task.epoch
        if not is_same_message and not (reason is OverReason.STALE and self._is_elsewhere(held)):
            await self._ack(held)
        if reason in (OverReason.CANCELLED, OverReason.GONE):
            await release_inputs(self._context, held)
        self._forget(held, reason.value)

    def _is_elsewhere(self, held: Held) -> bool:
        """Whether a later delivery of this very message is what outranked the attempt."""
        if held.fence_epoch is not None:
            return held.fence_epoch == held.task.epoch
        silent_s = self._context.clock.monotonic_s() - held.beaten_s
        return held.is_doubtful or silent_s > self._context.settings.ack_wait_s

    async def give_back(self, held: Held, delay_s: float, outcome: str) -> None:
        """Let the broker deliver it again; spends one of its deliveries."""
        held.close_inputs()
        try:
            await held.message.nak(delay_s)
        except BusError as error:
            # Without a nak it comes again once the ack timer ends.
            log.info("nak_failed", code=error.code)
        self._forget(held, outcome)

    async def hand_over(self, held: Held) -> None:
        """This worker leaves before the step ran: publish it anew for the others.

        A nak would count as a delivery, and so make the step suspect of killing its workers.
        """
        copy = moved_copy(held.task)
        identity = self._context.identity
        subject = subjects.work(identity.stage, identity.pool, copy.priority_class)
        message_id = subjects.message_id(copy.request_id, copy.step_id, copy.epoch)
        ttl_s = max(1.0, copy.deadline_unix_s - self._context.clock.unix_s()) + MESSAGE_GRACE_S
        try:
            await self._context.bus.publish_work(subject, codec.encode(copy), message_id=message_id, ttl_s=ttl_s)
            await held.message.ack()
        except FleetError as error:
            log.info("hand_over_failed", request_id=copy.request_id, code=error.code)
            await self.give_back(held, 0.0, "drained")
            return
        self._forget(held, "drained")

    def forget(self, held: Held, outcome: str) -> None:
        """The broker has given it to somebody else already: neither ack nor nak."""
        held.close_inputs()
        self._forget(held, outcome)

    async def go_solo(self, held: Held) -> None:
        """Publish it to run alone, as workers died with it in company; from now on only solo deaths count."""
        copy = solo_copy(held.task, self._context.clock.unix_s())
        await publish_task(self._context, held, copy, subject=held.message.subject)
        await self._ack(held)
        self._forget(held, "moved_to_solo")

    async def ack_again(self, message: WorkMessage, request_id: str) -> None:
        """The step was finished here and its ack got lost."""
        log.info("ack_repeated", request_id=request_id, delivery=message.delivery)
        await self._ack_message(message, request_id)

    async def pass_on(self, message: WorkMessage) -> None:
        """Work of another release: a worker that can read it may be in the pool; at the end the mover gives it up."""
        identity = self._context.identity
        log.warning("work_of_another_release", subject=message.subject, delivery=message.delivery)
        labels = {"stage": identity.stage.value, "model": identity.model}
        self._context.metrics.steps_total.labels(**labels, outcome="another_release").inc()
        try:
            await message.nak(_PASS_ON_DELAY_S)
        except BusError as error:
            log.info("nak_failed", code=error.code)

    async def dead_letter(self, message: WorkMessage, reason: str) -> None:
        """Not one of ours: keep the bytes for an operator, and never deliver them again."""
        identity = self._context.identity
        letter = DeadLetter(
            stage=identity.stage,
            reason=reason,
            payload=message.payload,
            subject=message.subject,
            num_delivered=message.delivery,
            died_unix_s=self._context.clock.unix_s(),
        )

        async def bury() -> None:
            await self._context.bus.publish_dead(identity.stage, letter)
            await message.term(reason)

        self._context.metrics.dead_letters_total.labels(stage=identity.stage.value, reason=reason).inc()
        log.error("message_dead_lettered", reason=reason, subject=message.subject, size_bytes=len(message.payload))
        until_unix_s = self._context.clock.unix_s() + _ACK_PATIENCE_S
        try:
            await self._context.outage.persist(bury, until_unix_s=until_unix_s, is_over=lambda: False)
        except DeadlineExceededError as error:
            # It is delivered again, and dead-lettered then.
            log.warning("dead_letter_postponed", reason=str(error))

    async def end_by(self, held: Held, error: BaseException, events: EventLog) -> None:
        """End an attempt by what went wrong with it.

        Raises:
            EngineDeadError: the worker has to go; the attempt is left as it is.
        """
        try:
            await self._end_by(held, error, events)
        except EngineDeadError:
            raise
        except CancelledWorkError:
            held.end(OverReason.CANCELLED)
            await self.drop(held)
        except FleetError as second:
            # The remedy itself failed (too late, too large); `fail` raises none of these.
            await self.fail(held, second, events)

    async def _end_by(self, held: Held, error: BaseException, events: EventLog) -> None:
        match error:
            case EngineDeadError():
                raise error
            case CancelledWorkError() if held.over_reason is OverReason.LATE:
                await self.fail(held, DeadlineExceededError("the deadline passed while it ran"), events)
            case CancelledWorkError():
                raise error
            case InputsLostError():
                await self._repaired(held, error.steps)
            case TensorNotFoundError():
                await self._repaired(held, _producers_of(held, error))
            case RequestError() | OverloadError():
                await self.fail(held, error, events)
            case EngineOutOfMemoryError() if held.message.delivery < _OUT_OF_MEMORY_DELIVERY:
                await self.give_back(held, _OUT_OF_MEMORY_DELAY_S, error.code)
            case EngineOutOfMemoryError():
                await self.fail(held, error, events)
            case DependencyError():
                self._run_again(held)
            case _ if held.message.delivery == 1 and not held.task.solo:
                await self.give_back(held, _RETRY_DELAY_S, "engine_error")
            case _:
                await self.fail(held, error, events)

    async def _repaired(self, held: Held, steps: frozenset[StepId]) -> None:
        held.close_inputs()
        await repair(self._context, held, steps)
        self._held_steps.finish(held)
        await self._ack(held)
        self._forget(held, "repaired")

    async def _ack(self, held: Held) -> None:
        await self._ack_message(held.message, held.task.request_id)

    async def _ack_message(self, message: WorkMessage, request_id: str) -> None:
        until_unix_s = self._context.clock.unix_s() + _ACK_PATIENCE_S
        try:
            await self._context.outage.persist(message.ack, until_unix_s=until_unix_s, is_over=lambda: False)
        except DeadlineExceededError as error:
            log.warning("ack_given_up", request_id=request_id, reason=str(error))

    def _forget(self, held: Held, outcome: str) -> None:
        if held not in self._held_steps:
            return
        self._held_steps.discard(held)
        held.end(OverReason.SETTLED)
        identity = self._context.identity
        labels = {"stage": identity.stage.value, "model": held.task.step.model}
        self._context.metrics.steps_total.labels(**labels, outcome=outcome).inc()
        started_unix_s = held.started_unix_s or self._context.clock.unix_s()
        log.info(
            "step_finished",
            stage=identity.stage.value,
            request_id=held.task.request_id,
            step_id=held.task.step_id,
            epoch=held.task.epoch,
            delivery=held.message.delivery,
            outcome=outcome,
            queue_wait_s=round(max(0.0, started_unix_s - held.task.enqueued_unix_s), 6),
            service_s=round(held.service_s, 6),
            batch_size=held.batch_size,
            bytes_in=held.bytes_in,
            bytes_out=held.bytes_out,
        )
        self._on_settled()


def _producers_of(held: Held, error: TensorNotFoundError) -> frozenset[StepId]:
    """The steps whose tensors an engine found gone; every input when it cannot be told."""
    if error.step_id is not None:
        return frozenset({StepId(error.step_id)})
    found = frozenset(want.step_id for want in held.wanted if want.ref == error.ref)
    return found or frozenset(want.step_id for want in held.wanted)
