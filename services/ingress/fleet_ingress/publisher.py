"""What the ingress sends to the fleet: the first step of a request, again when it must be, and cancellations."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import structlog

from fleet_common.bus.port import Bus, KeyValue
from fleet_common.clock import Clock
from fleet_common.errors import AdmissionRejectedError, BusError, DependencyError, QueueFullError, StoreError
from fleet_common.telemetry.names import IngressMetrics
from fleet_common.telemetry.tracing import stage_span
from fleet_common.tensors.port import Array, TensorStore
from fleet_contracts import codec, subjects
from fleet_contracts.base import RequestId
from fleet_contracts.control import PoolRoute
from fleet_contracts.tensors import TensorRef
from fleet_contracts.work import Cancel, Plan, StepTask
from fleet_ingress.view import FleetView

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Store and stream forget a request this long after its deadline: a redelivery may still be on its way.
GRACE_S = 30.0

_BACKOFF_S = (0.05, 0.1, 0.25, 0.5, 1.0)
_CANCEL_TRIES = 4


class StageUnavailableError(DependencyError):
    """No live worker at a stage the request has to pass."""

    code = "stage_unavailable"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet as an ingress reaches it."""

    bus: Bus
    store: TensorStore
    view: FleetView
    clock: Clock
    metrics: IngressMetrics


class Publisher:
    """Publishes under retries; every wait ends at the request's deadline."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tombstones: KeyValue | None = None

    async def start(self) -> None:
        """Open the bucket of tombstones. Raises BusError."""
        self._tombstones = await self._fleet.bus.kv(subjects.BUCKET_TOMBSTONES)

    async def publish_first(self, task: StepTask, body: bytes, patience_s: float) -> StepTask:
        """Put the root source into the store and publish the first step; only this publish may be refused.

        Args:
            patience_s: how long an unreachable broker, and a store without room, are tried.
        Returns:
            The task as published, with its root.
        Raises:
            StageUnavailableError: nobody works at the first stage.
            AdmissionRejectedError: the stage's queue is full.
            StoreError, BusError: out of reach for `patience_s`.
        """
        give_up_s = self._fleet.clock.monotonic_s() + patience_s
        pool = self.pick_pool(task)
        root = await self._patiently(lambda: self._put_root(task, body, pool), give_up_s)
        rooted = msgspec.structs.replace(task, root=root)
        try:
            await self._patiently(lambda: self._send(rooted, pool), give_up_s)
        except QueueFullError as err:
            await self.release([root])
            raise AdmissionRejectedError("The queue is full; try again later.", retry_after_s=2.0) from err
        except BaseException:
            await self.release([root])
            raise
        return rooted

    async def publish_again(self, task: StepTask, body: bytes, epoch: int) -> StepTask | None:
        """The first step once more at a higher epoch, from a fresh copy of the root; keeps trying to the deadline.

        Returns:
            The task as published; None when the deadline came first.
        """
        again = msgspec.structs.replace(task, epoch=epoch, enqueued_unix_s=self._fleet.clock.unix_s())
        for pause_s in _pauses():
            if self._fleet.clock.unix_s() >= task.deadline_unix_s:
                return None
            try:
                pool = self.pick_pool(again)
                rooted = msgspec.structs.replace(again, root=await self._put_root(again, body, pool))
                await self._send(rooted, pool)
            except DependencyError as err:
                log.debug("resubmission_delayed", request_id=task.request_id, code=err.code)
                await self._fleet.clock.sleep(pause_s)
            else:
                return rooted
        raise AssertionError("unreachable: pauses never end")

    async def cancel(self, request_id: RequestId, reason: str, deadline_unix_s: float) -> None:
        """Broadcast, and leave a tombstone until the deadline; best effort, as the deadline ends the work anyway."""
        message = codec.encode(Cancel(request_id=request_id, reason=reason, deadline_unix_s=deadline_unix_s))
        ttl_s = max(1.0, deadline_unix_s - self._fleet.clock.unix_s() + GRACE_S)
        assert self._tombstones is not None
        for pause_s, _ in zip(_pauses(), range(_CANCEL_TRIES), strict=False):
            try:
                await self._fleet.bus.publish(subjects.CANCEL, message)
                await self._tombstones.put(request_id, message, ttl_s=ttl_s)
            except BusError:
                await self._fleet.clock.sleep(pause_s)
            else:
                return
        log.warning("cancel_not_sent", request_id=request_id, reason=reason)

    async def read_file(self, ref: TensorRef, deadline_unix_s: float) -> bytes:
        """A file out of the store; an outage is waited out until the deadline.

        Raises TensorNotFoundError, StoreError.
        """
        clock = self._fleet.clock

        async def read() -> bytes:
            with await self._fleet.store.get(ref) as lease:
                return lease.array.tobytes()

        give_up_s = clock.monotonic_s() + max(0.0, deadline_unix_s - clock.unix_s())
        return await self._patiently(read, give_up_s)

    async def read(self, ref: TensorRef) -> Array:
        """A copy of a tensor. Raises TensorNotFoundError, StoreError."""
        with await self._fleet.store.get(ref) as lease:
            return np.array(lease.array)

    async def release(self, roots: list[TensorRef]) -> None:
        """Free root sources, files and answers; what cannot be freed now expires."""
        for ref in roots:
            try:
                await self._fleet.store.release(ref)
            except StoreError as err:
                log.debug("root_not_released", code=err.code)

    def pick_pool(self, task: StepTask) -> PoolRoute:
        """Late binding of a step by the table in force. Raises StageUnavailableError."""
        step = task.step
        pool = self._fleet.view.catalog.pick(step.stage, step.model, random.random(), task.plan.later_tags)
        if pool is None:
            raise StageUnavailableError(f"no live worker at stage {step.stage.value}")
        return pool

    def check_reachable(self, plan: Plan) -> None:
        """Raises StageUnavailableError when a stage on the way has no live worker that can read the plan."""
        catalog = self._fleet.view.catalog
        for stage, model in dict.fromkeys((step.stage, step.model) for step in plan.steps):
            if not catalog.has_worker(stage, model, tags=plan.later_tags):
                raise StageUnavailableError(f"no live worker at stage {stage.value}")

    async def _put_root(self, task: StepTask, body: bytes, pool: PoolRoute) -> TensorRef:
        ttl_s = max(1.0, task.deadline_unix_s - self._fleet.clock.unix_s() + GRACE_S)
        array = np.frombuffer(body, dtype=np.uint8)
        return await self._fleet.store.put(array, ttl_s=ttl_s, locality=pool.locality)

    async def _patiently(self, call: Callable[[], Awaitable[T]], give_up_s: float) -> T:
        for pause_s in _pauses():
            try:
                return await call()
            except QueueFullError:
                raise
            except DependencyError:
                if self._fleet.clock.monotonic_s() + pause_s >= give_up_s:
                    raise
                await self._fleet.clock.sleep(pause_s)
        raise AssertionError("unreachable: pauses never end")

    async def _send(self, task: StepTask, pool: PoolRoute) -> None:
        subject = subjects.work(task.step.stage, pool.pool, task.priority_class)
        ttl_s = max(1.0, task.deadline_unix_s - self._fleet.clock.unix_s() + GRACE_S)
        message_id = subjects.message_id(task.request_id, task.step_id, task.epoch)
        with stage_span("send", task.step.stage, {}):
            await self._fleet.bus.publish_work(subject, codec.encode(task), message_id=message_id, ttl_s=ttl_s)


def _pauses() -> Iterator[float]:
    yield from _BACKOFF_S
    while True:
        yield _BACKOFF_S[-1]
