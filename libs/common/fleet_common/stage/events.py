"""What an attempt tells the ingress: numbered, kept until the ingress has confirmed the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from fleet_common.errors import BusError, CancelledWorkError, NoResponderError
from fleet_common.stage.context import StageContext
from fleet_common.stage.held import Held, OverReason
from fleet_contracts import codec, subjects
from fleet_contracts.events import (
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Failure,
    Finished,
    Progress,
    RequestEvent,
    RootLost,
    Started,
    StepDone,
    Usage,
)
from fleet_contracts.preprocess import MediaItem
from fleet_contracts.tensors import TensorRef

log = structlog.get_logger(__name__)

R = TypeVar("R")

RESEND = "resend"
STALE = "stale"
GRANTED = "granted"

#: After the deadline a terminal event is still offered for this long: the ingress's own timer has fired by then.
_LATE_GRACE_S = 4.0

#: Resends in a row before the back-off starts.
_MAX_RESENDS = 3


def event_subject(held: Held) -> str:
    """Subject of the request's events."""
    task = held.task
    return subjects.event(task.events.ingress_id, task.request_id, task.events.nonce)


class EventLog:
    """Events of one attempt: numbered without gaps from `Started` = 0, and kept for a resend."""

    def __init__(self, context: StageContext, held: Held) -> None:
        self._context = context
        self._held = held
        self._subject = event_subject(held)
        self._kept: list[RequestEvent] = []
        self._num_at_pulse = 0
        self._is_ending = False

    @property
    def next_seq(self) -> int:
        """Sequence number the next event takes."""
        return len(self._kept)

    async def started(self) -> None:
        """Send `Started` unless it was sent."""
        if not self._kept:
            await self.send(Started(attempt=self._held.attempt, seq=0))

    async def send(self, event: RequestEvent) -> None:
        """Publish at most once; what is lost is sent again when the ingress asks or the connection is back."""
        self._kept.append(event)
        try:
            await self._context.bus.publish(self._subject, codec.encode(event))
        except BusError as error:
            log.debug("event_kept_back", code=error.code, seq=event.seq)

    async def pulse(self) -> None:
        """Show that the attempt lives when it had nothing to say since the last pulse: silence means a fault."""
        is_silent = len(self._kept) == self._num_at_pulse
        if self._kept and is_silent and not self._is_ending:
            await self.send(Progress(attempt=self._held.attempt, seq=self.next_seq, done_ratio=0.0))
        self._num_at_pulse = len(self._kept)

    async def step_done(self, outcome: str, media: tuple[MediaItem, ...] = ()) -> None:
        """Send the row of the timeline."""
        held = self._held
        now_unix_s = self._context.clock.unix_s()
        await self.started()
        await self.send(
            StepDone(
                attempt=held.attempt,
                seq=self.next_seq,
                pool=self._context.identity.pool,
                queued_unix_s=held.task.enqueued_unix_s,
                started_unix_s=held.started_unix_s or now_unix_s,
                finished_unix_s=now_unix_s,
                batch_size=held.batch_size,
                bytes_in=held.bytes_in,
                bytes_out=held.bytes_out,
                outcome=outcome,
                media=media,
            )
        )

    async def resend(self, from_seq: int = 0) -> None:
        """Publish kept events again; the ingress drops those it has."""
        for event in self._kept[from_seq:]:
            await self._context.bus.publish(self._subject, codec.encode(event))

    async def finished(
        self,
        usage: Usage,
        num_tokens: tuple[int, ...],
        num_chunks: int = 0,
        *,
        outputs: Mapping[str, TensorRef] | None = None,
    ) -> None:
        """Confirm the good end; `held` is over when another attempt holds the step.

        Args:
            outputs: tensors that are the answer.
        """
        event = Finished(
            attempt=self._held.attempt,
            seq=self.next_seq,
            usage=usage,
            num_tokens=num_tokens,
            num_chunks=num_chunks,
            outputs=dict(outputs or {}),
        )
        await self._confirm(event)

    async def failed(self, failure: Failure) -> None:
        """Confirm the bad end; `held` is over when another attempt holds the step."""
        await self.started()
        await self._confirm(Failed(attempt=self._held.attempt, seq=self.next_seq, failure=failure))

    async def _confirm(self, event: Finished | Failed) -> None:
        self._is_ending = True
        payload = codec.encode(event)

        async def ask() -> ClaimReply | Confirm:
            for _ in range(_MAX_RESENDS):
                reply = await ask_ingress(self._context, self._held, payload)
                if not isinstance(reply, Confirm) or reply.status != RESEND:
                    return reply
                await self.resend(reply.resend_from_seq)
            raise BusError("events sent again do not reach the ingress")

        reply = await persist_ask(self._context, self._held, ask)
        if reply.status == STALE:
            self._held.outranked(reply.fence_epoch)


async def claim(context: StageContext, held: Held) -> ClaimReply:
    """Take the stream over.

    Raises:
        CancelledWorkError: the ingress said `stale` or `gone`, or is gone itself; `held` is over.
    """
    payload = codec.encode(Claim(attempt=held.attempt))

    async def ask() -> ClaimReply:
        reply = await ask_ingress(context, held, payload)
        if isinstance(reply, ClaimReply):
            return reply
        return ClaimReply(status=reply.status, fence_epoch=reply.fence_epoch)

    reply = await persist_ask(context, held, ask)
    if reply.status == STALE:
        held.outranked(reply.fence_epoch)
    elif reply.status != GRANTED:
        held.end(OverReason.GONE)
    if reply.status != GRANTED:
        raise CancelledWorkError(f"the ingress refused the claim: {reply.status}")
    return reply


async def root_lost(context: StageContext, held: Held) -> str:
    """Ask the ingress to submit the request again; returns its answer's status."""
    payload = codec.encode(RootLost(attempt=held.attempt))

    async def ask() -> str:
        return (await ask_ingress(context, held, payload)).status

    return await persist_ask(context, held, ask)


async def ask_ingress(context: StageContext, held: Held, payload: bytes) -> ClaimReply | Confirm:
    """One request to the ingress. Raises BusError; a reply that is none of ours counts as a time-out of the bus."""
    try:
        answer = await context.bus.request(event_subject(held), payload, timeout_s=context.settings.confirm_timeout_s)
    except NoResponderError:
        if not held.task.is_job and context.view.is_ingress_gone(held.task.events.ingress_id):
            held.end(OverReason.GONE)
            raise CancelledWorkError("the ingress of this request is gone") from None
        raise
    try:
        return codec.decode_ingress_reply(answer)
    except codec.DecodeError as error:
        raise BusError("the ingress answered with bytes that are no message of ours") from error


async def persist_ask(context: StageContext, held: Held, ask: Callable[[], Awaitable[R]]) -> R:
    """Ask until there is an answer, with back-off under heartbeat; until the deadline and a little more.

    Raises:
        DeadlineExceededError: nobody answered.
        CancelledWorkError: the request is over.
    """
    late_unix_s = context.clock.unix_s() + _LATE_GRACE_S
    until_unix_s = max(held.task.deadline_unix_s, late_unix_s)
    # One ingress that does not answer is no reason to leave the work of the others alone.
    return await context.outage.persist(ask, until_unix_s=until_unix_s, is_over=lambda: held.is_abandoned, pauses=False)
