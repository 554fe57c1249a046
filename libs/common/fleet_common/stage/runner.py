"""The stage runner: from a delivery to its ack. See DESIGN section 7."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine

import structlog

from fleet_common.bus.port import Pull, WorkMessage
from fleet_common.errors import BusError, CancelledWorkError
from fleet_common.scheduling.batch_size import linger_s
from fleet_common.scheduling.classes import ClassPolicy, ClassQueues, Entry
from fleet_common.scheduling.composer import BatchLimits, compose
from fleet_common.scheduling.credits import NOTHING_WANTED, CreditPolicy, wanted
from fleet_common.scheduling.route import share_of
from fleet_common.stage.batch import BatchDriver
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import EventLog
from fleet_common.stage.held import Held, HeldSteps, OverReason
from fleet_common.stage.intake import Intake
from fleet_common.stage.plan import affinity_of
from fleet_common.stage.port import BatchEngine, StreamEngine
from fleet_common.stage.settle import Settler
from fleet_common.stage.stream import StreamDriver
from fleet_common.stage.waiting import wait_event
from fleet_contracts import subjects
from fleet_contracts.base import ANY_LANE, PriorityClass

log = structlog.get_logger(__name__)

#: How often deadlines, lost ingresses and the routing table's shares are looked at.
_SWEEP_S = 0.5
#: Pause before a step whose engine missed a dependency runs again.
_RUN_AGAIN_S = 0.5
#: Longest wait for the naks of a worker that leaves.
_LEAVE_S = 1.0


class StageRunner:
    """Runs the steps of one worker until it is drained.

    Args:
        max_batch_bytes: input bytes per batch, 0 = no bound.
        on_state: told when `state` changes.
    """

    def __init__(
        self,
        context: StageContext,
        engine: BatchEngine | StreamEngine,
        *,
        max_batch_bytes: int = 0,
        on_state: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._max_batch_bytes = max_batch_bytes
        self._on_state = on_state
        policy = ClassPolicy(weights=context.settings.class_weights, aging_s=context.settings.aging_s)
        self._queues: ClassQueues[Held] = ClassQueues(policy)
        self._held_steps = HeldSteps()
        self._settler = Settler(context, self._held_steps, on_settled=self._settled, run_again=self._run_again)
        self._stream: StreamDriver | None = None
        self._driver: BatchDriver | StreamDriver
        if isinstance(engine, StreamEngine):
            self._driver = self._stream = StreamDriver(context, engine, self._settler)
        else:
            self._driver = BatchDriver(context, engine, self._settler)
        self._intake = Intake(context, self._held_steps, self._settler, enqueue=self._enqueue, dequeue=self._dequeue)
        self._credits = CreditPolicy(
            slots=context.identity.slots,
            look_ahead_ratio=context.settings.look_ahead_ratio,
            shares={c: policy.share_ratio(c) for c in PriorityClass},
        )
        self._pulls: dict[tuple[PriorityClass, bool], Pull] = {}
        self._wake = asyncio.Event()
        self._drain_asked = asyncio.Event()
        self._is_draining = False
        self._group: asyncio.TaskGroup | None = None
        self._jobs: set[asyncio.Task[None]] = set()
        self._busy_lanes = 0
        self._is_solo_running = False
        context.outage.on_change(self._outage_changed)

    @property
    def state(self) -> str:
        """`ready`, `paused` while a dependency is out, `draining`."""
        if self._is_draining:
            return "draining"
        return "paused" if self._context.outage.is_out else "ready"

    @property
    def num_held(self) -> int:
        """Deliveries not settled yet."""
        return len(self._held_steps)

    def queued(self) -> dict[str, int]:
        """Steps held and not started, per class."""
        return {c.value: self._queues.count(c) for c in PriorityClass}

    async def run(self) -> None:
        """Run until drained.

        Raises:
            ExceptionGroup: with an EngineDeadError (what was held is nak'd), or a bug.
        """
        is_killed = False
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._context.bus.on_reconnect(self._reconnected)
                loops = [group.create_task(loop) for loop in (self._heartbeats(), self._schedule(), self._sweep())]
                await self._open_pulls()
                self._refresh_credits()
                await self._drain_asked.wait()
                await self._drain()
                for loop in loops:
                    loop.cancel()
        except asyncio.CancelledError:
            # Told to leave at once: the ack timer hands the work on.
            is_killed = True
            raise
        finally:
            self._group = None
            if not is_killed:
                await self._give_all_back("worker_left")

    def drain(self) -> None:
        """Stop pulling, hand over what waits, finish what runs within `drain_s`, nak the rest; `run` then returns."""
        self._is_draining = True
        self._drain_asked.set()
        self._on_state()

    def refresh(self) -> None:
        """Another routing table is in force: shares may have changed."""
        self._refresh_credits()

    def cancel(self, request_id: str) -> None:
        """The client is gone: stop every attempt of the request."""
        for held in self._held_steps.of_request(request_id):
            self._intake.end(held, OverReason.CANCELLED, self._spawn)

    async def _open_pulls(self) -> None:
        identity = self._context.identity
        lanes = [(False, ANY_LANE)]
        if identity.has_own_lane:
            lanes.append((True, subjects.worker_lane(identity.worker_id)))
        for priority_class in PriorityClass:
            for is_own, lane in lanes:
                self._pulls[(priority_class, is_own)] = await self._context.bus.pull(
                    identity.stage, identity.pool, priority_class, lane, self._accept
                )

    def _accept(self, message: WorkMessage) -> None:
        if self._group is not None and not self._is_draining:
            self._intake.accept(message, self._spawn)
        elif self._group is not None:
            self._spawn(self._refuse(message))

    async def _refuse(self, message: WorkMessage) -> None:
        try:
            await message.nak()
        except BusError as error:
            log.info("nak_failed", code=error.code)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._group is None:
            work.close()
            return
        try:
            job = self._group.create_task(work)
        except RuntimeError:
            # The group is being torn down: what is held is given back, the rest is delivered again.
            work.close()
            return
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def _enqueue(self, held: Held) -> None:
        task = held.task
        self._queues.push(
            Entry(
                key=_entry_key(held),
                priority_class=task.priority_class,
                enqueued_unix_s=task.enqueued_unix_s,
                arrived_s=held.arrived_s,
                item=held,
                affinity=affinity_of(task, held.wanted),
                cost_bytes=held.cost_bytes,
                is_solo=task.solo,
            )
        )
        self._wake.set()

    def _dequeue(self, held: Held) -> bool:
        return self._queues.remove(_entry_key(held)) is not None

    def _settled(self) -> None:
        self._refresh_credits()
        self._wake.set()

    def _run_again(self, held: Held) -> None:
        held.close_inputs()
        self._spawn(self._enqueue_later(held))

    async def _enqueue_later(self, held: Held) -> None:
        await self._context.clock.sleep(_RUN_AGAIN_S)
        if held.is_over:
            await self._settler.end_by(held, CancelledWorkError("over"), EventLog(self._context, held))
        else:
            self._enqueue(held)

    def _refresh_credits(self) -> None:
        is_pulling = not self._is_draining and not self._context.outage.is_out
        identity = self._context.identity
        share_ratio, num_workers = share_of(self._context.view.table, identity.pool, identity.worker_id)
        held = Counter(one.task.priority_class for one in self._held_steps)
        wants = wanted(self._credits.class_limits(share_ratio, num_workers), held)
        for (priority_class, is_own), pull in self._pulls.items():
            want = wants[priority_class] if is_pulling else NOTHING_WANTED
            pull.want(want.own_lane if is_own else want.any_lane)

    def _outage_changed(self) -> None:
        self._refresh_credits()
        self._on_state()

    async def _reconnected(self) -> None:
        self._refresh_credits()
        if self._stream is not None and self._group is not None:
            self._spawn(self._stream.resend_all())

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            wait_s = self._dispatch()
            await wait_event(self._context.clock, self._wake, wait_s)

    def _dispatch(self) -> float | None:
        """Start what can start; returns how long to wait for a fuller batch."""
        clock = self._context.clock
        while self._busy_lanes < self._driver.num_lanes and not self._is_solo_running and not self._is_draining:
            now_unix_s = clock.unix_s()
            seed = self._queues.peek(now_unix_s)
            if seed is None or (seed.is_solo and self._busy_lanes > 0):
                # A solo step waits for an empty engine: whatever it does to the process, it does to itself only.
                return None
            composed = compose(self._queues, self._limits(), now_s=clock.monotonic_s(), now_unix_s=now_unix_s)
            if not composed.batch:
                return composed.wait_s
            self._busy_lanes += 1
            self._is_solo_running = seed.is_solo
            self._spawn(self._run_batch([entry.item for entry in composed.batch]))
        return None

    def _limits(self) -> BatchLimits:
        stats = self._context.stats
        wait_s = linger_s(self._context.settings.batch_timeout_s, stats.service_s, stats.last_batch_size)
        max_batch = self._driver.max_batch
        return BatchLimits(
            max_batch=max_batch, max_bytes=self._max_batch_bytes, linger_s=wait_s if max_batch > 1 else 0.0
        )

    async def _run_batch(self, batch: list[Held]) -> None:
        try:
            await self._driver.run(batch, self._spawn)
        finally:
            self._busy_lanes -= 1
            self._is_solo_running = False
            self._wake.set()

    async def _heartbeats(self) -> None:
        clock = self._context.clock
        settings = self._context.settings
        last_s = clock.monotonic_s()
        while True:
            await clock.sleep(settings.heartbeat_s)
            now_s = clock.monotonic_s()
            if now_s - last_s > settings.ack_wait_s:
                self._thaw(now_s - last_s)
            last_s = now_s
            for held in self._held_steps:
                await held.message.in_progress()
                held.beaten_s = now_s
                if held.pulse is not None and not held.is_over:
                    await held.pulse()

    def _thaw(self, frozen_s: float) -> None:
        """This process stood still for longer than the ack timer: what it holds may be somebody else's by now."""
        log.warning("worker_was_frozen", frozen_s=round(frozen_s, 1), num_held=len(self._held_steps))
        for held in self._held_steps:
            held.is_doubtful = True
            if self._dequeue(held):
                self._settler.forget(held, "frozen")
        if self._stream is not None:
            self._spawn(self._stream.claim_again())

    async def _sweep(self) -> None:
        context = self._context
        while True:
            await context.clock.sleep(_SWEEP_S)
            now_unix_s = context.clock.unix_s()
            for held in self._held_steps:
                if now_unix_s >= held.task.deadline_unix_s:
                    self._intake.end(held, OverReason.LATE, self._spawn)
                elif not held.task.is_job and context.view.is_ingress_gone(held.task.events.ingress_id):
                    self._intake.end(held, OverReason.GONE, self._spawn)
            self._refresh_credits()

    async def _drain(self) -> None:
        log.info("drain_started", num_held=len(self._held_steps))
        for pull in self._pulls.values():
            await pull.stop()
        for held in self._held_steps:
            if self._dequeue(held):
                self._spawn(self._settler.hand_over(held))
        clock = self._context.clock
        until_s = clock.monotonic_s() + self._context.settings.drain_s
        while self._jobs and (left_s := until_s - clock.monotonic_s()) > 0:
            self._wake.clear()
            await wait_event(clock, self._wake, min(left_s, _SWEEP_S))
        for job in list(self._jobs):
            job.cancel()
        log.info("drain_finished", num_left=len(self._held_steps))

    async def _give_all_back(self, outcome: str) -> None:
        """Nak what is still held, so that others need not wait for the ack timer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                # Else the broker would hand what we give back to our own pulls.
                for pull in self._pulls.values():
                    await pull.stop()
                for held in self._held_steps:
                    await self._settler.give_back(held, 0.0, outcome)


def _entry_key(held: Held) -> str:
    attempt = held.attempt
    return f"{attempt.request_id}:{attempt.step_id}:{attempt.epoch}:{attempt.delivery}"
