"""A fleet in one process for unit tests: memory bus, memory store, a clock driven by hand, scripted engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fleet_common.bus.memory import MemoryBroker, MemoryBus
from fleet_common.bus.memory_work import WorkLimits
from fleet_common.settings import RunnerSettings
from fleet_common.stage.bucket import LazyBucket
from fleet_common.stage.context import StageContext, WorkerIdentity
from fleet_common.stage.outage import Outage
from fleet_common.stage.port import BatchEngine, StreamEngine
from fleet_common.stage.runner import StageRunner
from fleet_common.stage.stats import WorkerStats
from fleet_common.stage.view import MirrorView
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.tensors.factory import memory_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_common.testing.clock import ManualClock, settle
from fleet_common.testing.fake_ingress import FakeIngress
from fleet_common.testing.plans import MODEL, POOLS, one_pool_table
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import RoutingTable
from fleet_contracts.work import StepTask


@dataclass(slots=True, eq=False)
class RigWorker:
    """One running worker."""

    runner: StageRunner
    bus: MemoryBus
    view: MirrorView
    metrics: WorkerMetrics
    stats: WorkerStats
    job: asyncio.Task[None]

    async def kill(self) -> None:
        """End it as `kill -9` would: nothing is settled, nothing said."""
        self.job.cancel()
        await asyncio.wait([self.job])
        await self.view.close()
        await self.bus.close()

    async def drained(self) -> None:
        """Wait for the end of a drain."""
        await self.job


@dataclass(slots=True)
class Rig:
    """The surroundings; `await rig.start()` first."""

    settings: RunnerSettings = field(default_factory=lambda: RunnerSettings.model_validate({}))
    inline_bytes: int = 64
    clock: ManualClock = field(default_factory=ManualClock)
    broker: MemoryBroker = field(init=False)
    store: FleetTensorStore = field(init=False)
    ingress: FakeIngress = field(init=False)
    workers: list[RigWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = WorkLimits(ack_wait_s=self.settings.ack_wait_s, max_deliver=self.settings.max_deliver)
        self.broker = MemoryBroker(self.clock, limits)
        self.clock.on_move = self.broker.tick
        self.store = memory_store(self.clock, inline_bytes=self.inline_bytes)
        self.ingress = FakeIngress(self.broker.connect())

    async def start(self) -> None:
        """Register the ingress and publish a routing table with one pool per stage."""
        await self.ingress.start()
        await self.set_table(one_pool_table())

    async def set_table(self, table: RoutingTable) -> None:
        """Publish a routing table."""
        bucket = await self.broker.connect().kv(subjects.BUCKET_ROUTING)
        await bucket.put(subjects.ROUTING_KEY, codec.encode(table))
        await settle()

    async def worker(
        self, stage: Stage, engine: BatchEngine | StreamEngine, *, worker_id: str = "w0", slots: int = 4
    ) -> RigWorker:
        """Start a worker."""
        bus = self.broker.connect()
        view = MirrorView(bus, self.clock, lease_s=self.settings.lease_s)
        metrics = WorkerMetrics()
        context = StageContext(
            identity=WorkerIdentity(
                worker_id=WorkerId(worker_id),
                stage=stage,
                pool=POOLS[stage],
                model=MODEL,
                slots=slots,
                locality="memory",
                solo_from_delivery=2 if stage in (Stage.PREPROCESS, Stage.VISION_ENCODE) else 3,
            ),
            bus=bus,
            store=self.store,
            clock=self.clock,
            settings=self.settings,
            view=view,
            metrics=metrics,
            stats=WorkerStats(slots, self.clock.monotonic_s()),
            outage=Outage(self.clock),
            joins=LazyBucket(bus, subjects.BUCKET_JOINS),
            random_ratio=lambda: 0.0,
        )
        runner = StageRunner(context, engine)
        await view.open(on_cancel=runner.cancel)
        worker = RigWorker(runner, bus, view, metrics, context.stats, asyncio.create_task(runner.run()))
        self.workers.append(worker)
        await settle()
        return worker

    async def submit(self, task: StepTask) -> None:
        """Publish a task to the pool of its stage."""
        await self.ingress.submit(task, POOLS[task.step.stage])
        await settle()

    def tasks(self, stage: Stage) -> list[StepTask]:
        """Work items of a stage that are not settled."""
        return [codec.decode_task(payload) for payload in self.broker.work.payloads([stage])]

    async def stop(self) -> None:
        """End every worker."""
        for worker in self.workers:
            worker.job.cancel()
        if self.workers:
            await asyncio.wait([worker.job for worker in self.workers])
        for worker in self.workers:
            await worker.view.close()
        await self.ingress.stop()
