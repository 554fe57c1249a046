"""Placement at work: watches the fleet all the time, and publishes tables and moves items while it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from fleet_common.bus.port import BusMessage, ConsumerBacklog
from fleet_common.clock import Clock
from fleet_common.errors import BusError
from fleet_common.telemetry.http import Readiness
from fleet_common.telemetry.names import PlacementMetrics
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import RoutingTable, WorkerInfo
from fleet_contracts.models import ModelSpec, ModelState
from fleet_placement.core.events import (
    BacklogMeasured,
    Deposed,
    Event,
    Interrupted,
    Leading,
    ModelWanted,
    PublishTable,
    ReportDoubted,
    TelemetryReceived,
    Tick,
    WorkerGone,
    WorkerSeen,
)
from fleet_placement.core.machine import step
from fleet_placement.core.state import PlacementConfig, PlacementState
from fleet_placement.leader import Leadership, LeadershipLostError
from fleet_placement.mover import Mover, PlacementBus
from fleet_placement.tables import TableWriter

log = structlog.get_logger(__name__)

_TICK_S = 0.25
#: States in which a model's pools are remembered though their workers are away.
_SERVED = frozenset({ModelState.LOADING, ModelState.READY})

_WORKER_KEY = "worker."


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service works with; made in the composition root."""

    bus: PlacementBus
    leadership: Leadership
    tables: TableWriter
    metrics: PlacementMetrics
    clock: Clock


class PlacementService:
    """One instance: a leader or its stand-by."""

    def __init__(self, config: PlacementConfig, parts: Parts, *, sweep_s: float, move_batch: int) -> None:
        self._config = config
        self._bus = parts.bus
        self._leadership = parts.leadership
        self._tables = parts.tables
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._sweep_s = sweep_s
        self._state = PlacementState()
        self._mover = Mover(parts.bus, lambda: self._state, parts.metrics, parts.clock, move_batch)
        self._unwritten: RoutingTable | None = None
        self._has_table = asyncio.Event()
        self._is_watching = False

    @property
    def is_leading(self) -> bool:
        """This instance publishes tables now."""
        return self._state.is_leading

    def readiness(self) -> Readiness:
        """A stand-by is ready too: it can take over."""
        if not self._bus.is_connected:
            return Readiness(is_ready=False, reason="the broker is out of reach")
        return Readiness(is_ready=self._is_watching, reason="the registry is not read yet")

    async def run(self) -> None:
        """Watch, and lead whenever the lease can be had, until cancelled; then give the lease back."""
        registry = await self._bus.kv(subjects.BUCKET_REGISTRY)
        models = await self._bus.kv(subjects.BUCKET_MODELS)
        mirrors = [await models.mirror(self._models_changed), await registry.mirror(self._registry_changed)]
        reports = await self._bus.subscribe(subjects.TELEMETRY_ALL, self._report_came)
        self._bus.on_reconnect(self._reconnected)
        self._is_watching = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick())
                tasks.create_task(self._contend())
        finally:
            await self._leadership.resign()
            await reports.stop()
            for mirror in mirrors:
                await mirror.stop()

    async def _contend(self) -> None:
        """Lead, be deposed, wait for the lease, lead again: each tenure in a task of its own."""
        while True:
            async with asyncio.TaskGroup() as tenure:
                tenure.create_task(self._serve_tenure())

    async def _serve_tenure(self) -> None:
        """Wait for the lease, then lead until it is lost."""
        await self._leadership.acquire()
        try:
            await self._lead()
        except* LeadershipLostError as lost:
            log.warning("leadership_lost", reason=str(lost.exceptions[0]))
        finally:
            self._feed(Deposed())
            self._unwritten = None
            self._metrics.is_leader.set(0)

    async def _lead(self) -> None:
        table = await self._tables.read()
        log.info("leadership_taken_over", revision=table.revision if table else 0)
        self._metrics.is_leader.set(1)
        self._feed(Leading(table))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._leadership.keep())
            tasks.create_task(self._write_tables())
            tasks.create_task(self._sweep())
            tasks.create_task(self._bury())

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            self._feed(Tick() if self._bus.is_connected else Interrupted())

    async def _reconnected(self) -> None:
        self._feed(Interrupted())

    def _registry_changed(self, key: str, value: bytes | None) -> None:
        if not key.startswith(_WORKER_KEY):
            return
        if value is None:
            self._feed(WorkerGone(WorkerId(key.rpartition(".")[2])))
            return
        try:
            info = codec.decode_registry_entry(value)
        except codec.DecodeError as err:
            log.warning("registry_entry_undecodable", key=key, error=str(err))
            return
        if isinstance(info, WorkerInfo):
            self._feed(WorkerSeen(info))

    def _models_changed(self, key: str, value: bytes | None) -> None:
        if value is None:
            return
        try:
            record = codec.decode_model_record(value)
        except codec.DecodeError as err:
            log.warning("model_record_undecodable", key=key, error=str(err))
            return
        # What became of it comes after what was wanted: a model that failed is in no table either.
        is_wanted = record.is_wanted if isinstance(record, ModelSpec) else record.state in _SERVED
        self._feed(ModelWanted(record.model, is_wanted))

    async def _report_came(self, message: BusMessage) -> None:
        try:
            report = codec.decode_telemetry(message.payload)
        except codec.DecodeError as err:
            log.warning("telemetry_undecodable", subject=message.subject, error=str(err))
            return
        self._feed(TelemetryReceived(report))

    def _feed(self, event: Event) -> None:
        self._state, effects = step(self._config, self._state, event, self._clock.monotonic_s())
        for effect in effects:
            match effect:
                case PublishTable(table):
                    # Only the latest matters: one not written yet is replaced.
                    self._unwritten = table
                    self._has_table.set()
                case ReportDoubted(worker_id, reasons):
                    log.warning("telemetry_doubted", worker_id=worker_id, reasons=list(reasons))

    async def _write_tables(self) -> None:
        while True:
            await self._has_table.wait()
            self._has_table.clear()
            table, self._unwritten = self._unwritten, None
            if table is None:
                continue
            await self._tables.write(table)
            log.info("table_published", revision=table.revision, reasons=list(table.reasons))
            self._show(table)

    def _show(self, table: RoutingTable) -> None:
        self._metrics.table_revision.set(table.revision)
        self._metrics.worker_share_ratio.clear()
        for route in table.routes:
            for pool in route.pools:
                for share in pool.workers:
                    labels = (route.stage.value, pool.pool, share.worker_id)
                    self._metrics.worker_share_ratio.labels(*labels).set(share.share_ratio)

    async def _sweep(self) -> None:
        """Look at what waits in the broker, move what waits in vain, and see that the table is still there."""
        while True:
            try:
                backlogs = await self._bus.pool_pending()
                self._count(backlogs)
                await self._mover.sweep(backlogs)
                await self._tables.check()
            except BusError as err:
                log.warning("sweep_failed", error=str(err))
            await self._clock.sleep(self._sweep_s)

    def _count(self, backlogs: Sequence[ConsumerBacklog]) -> None:
        pending: dict[tuple[Stage, str], int] = {}
        by_class: dict[tuple[str, str, str], int] = {}
        for backlog in backlogs:
            pool = (backlog.stage, backlog.pool)
            pending[pool] = pending.get(pool, 0) + backlog.num_pending
            labels = (backlog.stage.value, backlog.pool, backlog.priority_class.value)
            by_class[labels] = by_class.get(labels, 0) + backlog.num_pending
        for labels, count in by_class.items():
            self._metrics.pool_pending.labels(*labels).set(count)
        unsettled = frozenset(
            (backlog.stage, backlog.pool) for backlog in backlogs if backlog.num_pending + backlog.num_ack_pending
        )
        self._feed(BacklogMeasured(pending, unsettled))

    async def _bury(self) -> None:
        """Listen for items at the end of their deliveries for as long as this instance leads."""
        while True:
            try:
                listening = await self._bus.max_deliveries(self._mover.bury)
            except BusError as err:
                log.warning("dead_items_not_watched", error=str(err))
                await self._clock.sleep(self._sweep_s)
                continue
            try:
                await asyncio.Event().wait()
            finally:
                await listening.stop()
