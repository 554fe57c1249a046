"""The mover: items nobody can finish become dead letters, items nobody pulls go where somebody does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from fleet_common.bus.port import Bus, BusAdmin, ConsumerBacklog, DeadDelivery, WorkMessage
from fleet_common.clock import Clock
from fleet_common.errors import BusError, NoResponderError, QueueFullError
from fleet_common.failures import poison_failure
from fleet_common.telemetry.names import PlacementMetrics
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage
from fleet_contracts.events import Confirm, Failed
from fleet_contracts.work import DeadLetter, TaskHead
from fleet_placement.core.moves import Backlog, Stranded, giving_up, life_s, moved, stranded, target_pool
from fleet_placement.core.state import PlacementState

log = structlog.get_logger(__name__)

_CONFIRM_TIMEOUT_S = 2.0
_CONFIRM_ATTEMPTS = 5
_CONFIRM_PAUSE_S = 0.5

#: Delay before an item that found no place is offered again.
_PLACELESS_PAUSE_S = 5.0


class PlacementBus(Bus, BusAdmin, Protocol):
    """What placement needs of its connection."""


class Mover:
    """Acts for the leader; `state` gives what placement knows at the moment."""

    def __init__(
        self,
        bus: PlacementBus,
        state: Callable[[], PlacementState],
        metrics: PlacementMetrics,
        clock: Clock,
        batch: int,
    ) -> None:
        self._bus = bus
        self._state = state
        self._metrics = metrics
        self._clock = clock
        self._batch = batch

    async def sweep(self, backlogs: Sequence[ConsumerBacklog]) -> int:
        """Empty every stranded queue, a batch at a time. Returns how many items moved. Raises BusError."""
        found = stranded(self._state(), [_backlog(backlog) for backlog in backlogs], self._clock.monotonic_s())
        num_moved = 0
        for queue in found:
            num_moved += await self._empty(queue)
        return num_moved

    async def _empty(self, queue: Stranded) -> int:
        backlog = queue.backlog
        num_moved = 0
        # As many as were counted, and no more: others may be publishing to the queue meanwhile.
        for _ in range(-(-backlog.num_items // self._batch)):
            messages = await self._bus.take(
                backlog.stage, backlog.pool, backlog.priority_class, backlog.lane, self._batch
            )
            for message in messages:
                num_moved += await self._move(queue, message)
            if len(messages) < self._batch:
                break
        if num_moved:
            facts = {"stage": backlog.stage.value, "pool": backlog.pool, "lane": backlog.lane}
            log.info("items_moved", num_items=num_moved, reason=queue.reason, **facts)
        return num_moved

    async def _move(self, queue: Stranded, message: WorkMessage) -> bool:
        """Publish a copy, then ack. A death in between repeats the copy under the same message id."""
        backlog = queue.backlog
        try:
            task = codec.decode_task(message.payload)
        except codec.DecodeError:
            if _head(message.payload) is not None:
                # Of a later release: it waits for workers that can read it, or is given up in time.
                await message.nak(_PLACELESS_PAUSE_S)
                return False
            await self._bus.publish_dead(backlog.stage, self._letter(message, backlog, "undecodable message"))
            await message.term("undecodable message")
            return False
        now_unix_s = self._clock.unix_s()
        ttl_s = life_s(task, now_unix_s)
        if ttl_s == 0.0:
            await message.ack()
            return False
        pool = target_pool(self._state(), queue, task.step.model, task.plan.later_tags)
        if pool is None:
            await message.nak(_PLACELESS_PAUSE_S)
            return False
        copy = moved(task, now_unix_s)
        try:
            await self._bus.publish_work(
                subjects.work(backlog.stage, pool, backlog.priority_class),
                codec.encode(copy),
                message_id=subjects.message_id(copy.request_id, copy.step_id, copy.epoch),
                ttl_s=ttl_s,
            )
        except QueueFullError:
            # It stays where it is; the broker offers it again, and the next sweep tries again.
            return False
        await message.ack()
        self._metrics.moved_total.labels(backlog.stage.value, queue.reason).inc()
        return True

    def _letter(self, message: WorkMessage, backlog: Backlog, reason: str) -> DeadLetter:
        return DeadLetter(
            stage=backlog.stage,
            reason=reason,
            payload=message.payload,
            subject=message.subject,
            num_delivered=message.delivery,
            died_unix_s=self._clock.unix_s(),
        )

    async def bury(self, dead: DeadDelivery) -> None:
        """Tell the ingress, store the dead letter, then take the item out of its stream. Raises BusError.

        In that order: whatever fails, the item comes again, and an ingress that was told already says so.
        """
        reason = f"given up after {dead.num_delivered} deliveries without an answer"
        head = _head(dead.payload)
        if head is None:
            reason = "undecodable message"
        else:
            await self._tell_ingress(head, dead.stage)
        letter = DeadLetter(
            stage=dead.stage,
            reason=reason,
            payload=dead.payload,
            subject=dead.subject,
            num_delivered=dead.num_delivered,
            died_unix_s=self._clock.unix_s(),
        )
        await self._bus.publish_dead(dead.stage, letter)
        await dead.settle()
        self._metrics.dead_letters_total.labels(dead.stage.value).inc()
        log.error("item_dead_lettered", stage=dead.stage.value, subject=dead.subject, reason=reason)

    async def _tell_ingress(self, task: TaskHead, stage: Stage) -> None:
        """Send `Failed` until it is confirmed; an ingress that is gone needs no telling."""
        subject = subjects.event(task.events.ingress_id, task.request_id, task.events.nonce)
        event = codec.encode(Failed(attempt=giving_up(task, stage), seq=0, failure=poison_failure(task.request_id)))
        for _ in range(_CONFIRM_ATTEMPTS):
            try:
                answer = codec.decode_ingress_reply(
                    await self._bus.request(subject, event, timeout_s=_CONFIRM_TIMEOUT_S)
                )
            except (BusError, codec.DecodeError) as err:
                is_gone = isinstance(err, NoResponderError) and not await self._is_registered(task)
                log.warning("failure_not_confirmed", request_id=task.request_id, error=str(err), is_gone=is_gone)
                if is_gone:
                    return
            else:
                if isinstance(answer, Confirm) and answer.status != "resend":
                    return
            await self._clock.sleep(_CONFIRM_PAUSE_S)
        log.error("failure_never_confirmed", request_id=task.request_id)

    async def _is_registered(self, task: TaskHead) -> bool:
        registry = await self._bus.kv(subjects.BUCKET_REGISTRY)
        return await registry.get(f"ingress.{task.events.ingress_id}") is not None


def _head(payload: bytes) -> TaskHead | None:
    """What of a work item every release can read; None when the bytes are none."""
    try:
        return codec.decode_task_head(payload)
    except codec.DecodeError:
        return None


def _backlog(backlog: ConsumerBacklog) -> Backlog:
    return Backlog(
        stage=backlog.stage,
        pool=backlog.pool,
        priority_class=backlog.priority_class,
        lane=backlog.lane,
        num_items=backlog.num_pending + backlog.num_ack_pending,
    )
