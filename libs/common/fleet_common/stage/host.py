"""The whole life of a worker process: everything but the engine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import random
import secrets
import signal
import socket
from dataclasses import dataclass

import msgspec
import structlog
import uvloop

from fleet_common.bus.apply import verify
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.topology import TopologyLimits
from fleet_common.clock import Clock, SystemClock
from fleet_common.errors import BusError, EngineDeadError
from fleet_common.logging import setup_logging
from fleet_common.settings import CommonSettings, WorkerSettings
from fleet_common.stage.bucket import LazyBucket
from fleet_common.stage.context import StageContext, WorkerIdentity
from fleet_common.stage.outage import Outage
from fleet_common.stage.port import AdapterEngine, BatchEngine, ObservedEngine, StreamEngine
from fleet_common.stage.presence import Presence
from fleet_common.stage.runner import StageRunner
from fleet_common.stage.stats import WorkerStats
from fleet_common.stage.view import MirrorView
from fleet_common.telemetry.http import HealthServer, Readiness
from fleet_common.telemetry.names import BusCollector, WorkerMetrics
from fleet_common.telemetry.tracing import setup_tracing
from fleet_common.tensors.arena import read_boot_id
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_common.tensors.spill import bus_spill, serve_spill
from fleet_common.tensors.tend import tend
from fleet_contracts import codec, subjects
from fleet_contracts.base import ANY_LANE, Stage, WorkerId
from fleet_contracts.control import Telemetry, WorkerInfo

log = structlog.get_logger(__name__)

_CLOSE_S = 5.0
_SAME_SIGNAL_S = 1.0
_OBSERVE_S = 1.0
#: State of a worker whose engine hangs. Not `paused`: nobody knows whether it comes back, so it is given no new work.
_STALLED_STATE = "stalled"
#: A broker that starts together with its workers gets this long.
_CONNECT_PATIENCE_S = 30.0
_CONNECT_PAUSE_S = 0.5

#: Delivery from which a task in company is published again to run alone.
_SOLO_FROM = dict.fromkeys((Stage.DECODE, Stage.AUDIO_TRANSCRIBE, Stage.AUDIO_SPEAK, Stage.DIFFUSION_GENERATE), 3)
_SOLO_FROM_DEFAULT = 2


def run_worker(
    common: CommonSettings,
    worker: WorkerSettings,
    stage: Stage,
    engine: BatchEngine | StreamEngine,
    *,
    metrics: WorkerMetrics | None = None,
) -> None:
    """Serve until told to stop; call it from `__main__`.

    SIGTERM or SIGINT drains within `runner.drain_s`; a second one ends at once. Ends the process with status 1 when
    the engine died or the broker is not what `fleet bus apply` makes.

    Args:
        metrics: pass the instance an engine counts into; else one is made.
    """
    worker_id = worker.worker_id or f"{stage.value.replace('_', '-')}-{secrets.token_hex(3)}"
    setup_logging(common.telemetry, stage.value, worker_id=worker_id)
    setup_tracing(common.telemetry, stage.value)
    host = WorkerHost(common, worker, WorkerId(worker_id), stage, engine, metrics or WorkerMetrics())
    has_failed = False
    try:
        uvloop.run(host.run())
    except* (BusError, EngineDeadError) as errors:
        log.error("worker_failed", reasons=_reasons(errors))
        has_failed = True
    if has_failed:
        raise SystemExit(1)


def _reasons(errors: BaseExceptionGroup[BaseException]) -> list[str]:
    found: list[str] = []
    for error in errors.exceptions:
        found += _reasons(error) if isinstance(error, BaseExceptionGroup) else [f"{type(error).__name__}: {error}"]
    return found


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the host opens before the engine is loaded."""

    bus: NatsBus
    store: FleetTensorStore
    view: MirrorView
    runner: StageRunner
    presence: Presence


class WorkerHost:
    """Opens, wires and closes the parts of one worker process."""

    def __init__(
        self,
        common: CommonSettings,
        worker: WorkerSettings,
        worker_id: WorkerId,
        stage: Stage,
        engine: BatchEngine | StreamEngine,
        metrics: WorkerMetrics,
    ) -> None:
        self._common = common
        self._worker = worker
        self._worker_id = worker_id
        self._stage = stage
        self._engine = engine
        self._metrics = metrics
        self._clock: Clock = SystemClock()
        self._locality = common.store.locality or read_boot_id()
        self._stats = WorkerStats(worker.slots, self._clock.monotonic_s())
        self._runner: StageRunner | None = None
        self._presence: Presence | None = None
        self._is_ready = False
        self._is_stalled = False
        self._told_s: float | None = None
        self._has_own_lane = False

    async def run(self) -> None:
        """Live until drained.

        Raises:
            BusError: the broker is out of reach, or not as `fleet bus apply` makes it.
            ExceptionGroup: with an EngineDeadError, or a bug.
        """
        me = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, me)
        health = HealthServer(self._metrics.registry, self._readiness)
        port = await health.start(self._common.telemetry.metrics_host, self._common.telemetry.metrics_port)
        log.info("worker_starting", pool=self._worker.pool, model=self._worker.model, metrics_port=port)
        try:
            async with contextlib.AsyncExitStack() as stack:
                parts = await self._open(stack)
                await self._serve(parts)
        except asyncio.CancelledError:
            if self._told_s is None:
                raise
            log.warning("worker_left_at_once")
        finally:
            await health.stop()
        log.info("worker_stopped")

    def _told_to_stop(self, me: asyncio.Task[None] | None) -> None:
        now_s = self._clock.monotonic_s()
        if self._told_s is None and self._is_ready and self._runner is not None:
            self._told_s = now_s
            self._runner.drain()
            return
        # Ctrl-C reaches a worker twice, from the terminal and from whoever started it: that is one signal.
        is_second = self._told_s is not None and now_s - self._told_s > _SAME_SIGNAL_S
        if is_second or not self._is_ready:
            self._told_s = now_s
            if me is not None:
                me.cancel()

    def _readiness(self) -> Readiness:
        if not self._is_ready or self._runner is None:
            return Readiness(is_ready=False, reason="starting")
        if self._is_stalled:
            return Readiness(is_ready=False, reason="engine_stalled")
        state = self._runner.state
        return Readiness(is_ready=state == "ready", reason=state)

    async def _open(self, stack: contextlib.AsyncExitStack) -> _Parts:
        runner_settings = self._common.runner
        bus = await self._connect()
        stack.push_async_callback(bus.close)
        self._metrics.registry.register(BusCollector(lambda: bus.stats.for_metrics()))
        self._has_own_lane = has_own_lane = await self._verify(bus)
        store = await open_store(self._common.store, owner=self._worker_id, spill=bus_spill(bus), clock=self._clock)
        stack.push_async_callback(store.close)
        spill = await serve_spill(bus, store)
        stack.push_async_callback(spill.stop)
        view = MirrorView(bus, self._clock, lease_s=runner_settings.lease_s)
        runner = StageRunner(
            self._context(bus, store, view, has_own_lane),
            self._engine,
            max_batch_bytes=runner_settings.max_batch_bytes,
            on_state=self._state_changed,
        )
        await view.open(on_cancel=runner.cancel, on_table=runner.refresh)
        stack.push_async_callback(view.close)
        presence = Presence(
            bus,
            self._clock,
            self._info(),
            lease_s=runner_settings.lease_s,
            report=lambda: self._report(store, runner, bus),
        )
        stack.push_async_callback(presence.leave)
        self._runner = runner
        self._presence = presence
        return _Parts(bus, store, view, runner, presence)

    async def _serve(self, parts: _Parts) -> None:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(work)
                for work in (parts.presence.keep(), parts.presence.tell(), tend(parts.store, self._clock))
            ]
            try:
                cards = await self._engine.start()
                self._is_ready = True
                parts.presence.update(msgspec.structs.replace(parts.presence.info, state="ready", cards=cards))
                log.info("worker_ready", models=[card.model for card in cards])
                observer = group.create_task(self._observe_engine())
                try:
                    await parts.runner.run()
                finally:
                    # Before the engine is closed on purpose.
                    observer.cancel()
            finally:
                await self._close_engine()
                for task in background:
                    task.cancel()

    async def _connect(self) -> NatsBus:
        until_s = self._clock.monotonic_s() + _CONNECT_PATIENCE_S
        while True:
            try:
                return await connect_bus(self._common.bus, self._worker_id)
            except BusError as error:
                if self._clock.monotonic_s() > until_s:
                    raise
                log.info("broker_awaited", reason=str(error))
            await self._clock.sleep(_CONNECT_PAUSE_S)

    async def _verify(self, bus: NatsBus) -> bool:
        """Refuse to run against another topology. Returns whether this worker has a lane of its own."""
        settings = self._common.runner
        limits = TopologyLimits(ack_wait_s=settings.ack_wait_s, max_deliver=settings.max_deliver)
        await verify(bus, self._stage, self._worker.pool, [ANY_LANE], limits)
        try:
            await verify(bus, self._stage, self._worker.pool, [subjects.worker_lane(self._worker_id)], limits)
        except BusError as error:
            # A worker that was not declared (scaled up by hand) serves the common lane only.
            log.info("worker_lane_absent", reason=str(error))
            return False
        return True

    def _context(self, bus: NatsBus, store: FleetTensorStore, view: MirrorView, has_own_lane: bool) -> StageContext:
        worker = self._worker
        return StageContext(
            identity=WorkerIdentity(
                worker_id=self._worker_id,
                stage=self._stage,
                pool=worker.pool,
                model=worker.model,
                slots=worker.slots,
                locality=self._locality,
                solo_from_delivery=_SOLO_FROM.get(self._stage, _SOLO_FROM_DEFAULT),
                has_own_lane=has_own_lane,
            ),
            bus=bus,
            store=store,
            clock=self._clock,
            settings=self._common.runner,
            view=view,
            metrics=self._metrics,
            stats=self._stats,
            outage=Outage(self._clock),
            joins=LazyBucket(bus, subjects.BUCKET_JOINS),
            random_ratio=random.random,
        )

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self._worker_id,
            stage=self._stage,
            pool=self._worker.pool,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="starting",
            slots=self._worker.slots,
            locality=self._locality,
            release=importlib.metadata.version("omnifleet"),
            started_unix_s=self._clock.unix_s(),
            accepted_tags=codec.ACCEPTED_TAGS,
        )

    def _state_changed(self) -> None:
        if self._is_ready and self._runner is not None and self._presence is not None:
            self._presence.set_state(_STALLED_STATE if self._is_stalled else self._runner.state)

    async def _observe_engine(self) -> None:
        """Notice an engine that died or hangs though nothing runs on it. Raises EngineDeadError."""
        engine = self._engine
        while isinstance(engine, ObservedEngine):
            await self._clock.sleep(_OBSERVE_S)
            if isinstance(engine, AdapterEngine):
                self._tell_adapters(engine)
            if not engine.is_alive():
                raise EngineDeadError("the engine died")
            is_stalled = not engine.is_responsive()
            if is_stalled != self._is_stalled:
                log.warning("engine_stalled" if is_stalled else "engine_recovered")
                self._is_stalled = is_stalled
                self._state_changed()

    def _tell_adapters(self, engine: AdapterEngine) -> None:
        """Whoever publishes the next step for one of them prefers this worker, by its lane."""
        presence, held = self._presence, engine.adapters()
        if presence is not None and self._has_own_lane and held != presence.info.adapters:
            presence.update(msgspec.structs.replace(presence.info, adapters=held))

    def _report(self, store: FleetTensorStore, runner: StageRunner, bus: NatsBus) -> Telemetry:
        """This second's report; the gauges are set from the same figures."""
        stage = self._stage.value
        queued = runner.queued()
        store_bytes = 0
        for name, stats in store.stats().items():
            store_bytes += stats.used_bytes
            self._metrics.store_bytes.labels(connector=name).set(stats.used_bytes)
            totals = {
                "put": stats.put_total,
                "get": stats.get_total,
                "miss": stats.miss_total,
                "full": stats.full_total,
                "spill": stats.spill_total,
            }
            for operation, total in totals.items():
                self._metrics.store_operations.labels(connector=name, operation=operation).set(total)
        for priority_class, count in queued.items():
            self._metrics.queued_requests.labels(stage=stage, priority_class=priority_class).set(count)
        self._metrics.inflight_requests.labels(stage=stage).set(self._stats.in_flight)
        now_s = self._clock.monotonic_s()
        engine = self._engine
        return Telemetry(
            worker_id=self._worker_id,
            stage=self._stage,
            pool=self._worker.pool,
            sent_unix_s=self._clock.unix_s(),
            slots=self._worker.slots,
            state=runner.state if self._is_ready else "starting",
            queued=queued,
            in_flight=self._stats.in_flight,
            completed_total=self._stats.completed_total,
            failed_total=self._stats.failed_total,
            busy_s_total=self._stats.busy_s_total(now_s),
            service_s=self._stats.service_s,
            queue_wait_s=self._stats.queue_wait_s,
            utilisation_ratio=self._stats.utilisation_ratio(now_s),
            kv_cache_usage_ratio=engine.kv_cache_usage_ratio() if isinstance(engine, ObservedEngine) else 0.0,
            store_bytes=store_bytes,
        )

    async def _close_engine(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._engine.close()
