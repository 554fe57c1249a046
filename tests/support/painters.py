"""An ingress and workers that draw, in one process: real HTTP, real stage runners, memory bus and store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fleet_common.bus.memory import MemoryBroker, MemoryBus
from fleet_common.clock import SystemClock
from fleet_common.settings import RunnerSettings
from fleet_common.stage.bucket import LazyBucket
from fleet_common.stage.context import StageContext, WorkerIdentity
from fleet_common.stage.outage import Outage
from fleet_common.stage.runner import StageRunner
from fleet_common.stage.stats import WorkerStats
from fleet_common.stage.view import MirrorView
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.tensors.factory import memory_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import ModelCard, PoolRoute, Route, RoutingTable, WorkerInfo
from fleet_diffusion.core.limits import Caps
from fleet_diffusion.core.steps import StepPolicy
from fleet_diffusion.engine.port import PictureModel
from fleet_diffusion.worker import DiffusionEngine
from fleet_ingress.context import Ingress
from fleet_ingress.lifecycle import prepare_ingress
from fleet_ingress.settings import IngressSettings
from fleet_ingress.testing.rig import eventually, served
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.picture_worker import PicturePreprocessEngine

PAINTER = "painter"
TEXT_MODEL = "llm"
POOL = "diffusion-p"
READER_POOL = "preprocess-p"
CAPS = Caps(max_side=128, max_pixels=128 * 96, max_steps=1000, max_pictures=8, max_prompt_chars=500)


@dataclass(slots=True, eq=False)
class Painter:
    """One worker."""

    engine: DiffusionEngine | PicturePreprocessEngine
    bus: MemoryBus
    view: MirrorView
    job: asyncio.Task[None]
    metrics: WorkerMetrics

    async def kill(self) -> None:
        """End it as `kill -9` would: nothing is settled, nothing said."""
        self.job.cancel()
        await asyncio.wait([self.job])
        await self.engine.close()
        await self.view.close()
        await self.bus.close()


@dataclass(slots=True)
class PictureFleet:
    """A fleet that answers on `url`."""

    broker: MemoryBroker
    store: FleetTensorStore
    ingress: Ingress
    url: str
    painters: list[Painter] = field(default_factory=list)
    readers: list[Painter] = field(default_factory=list)

    async def painter(self, model: PictureModel, *, slots: int = 8, max_batch: int = 8) -> Painter:
        """Start a worker, and tell the fleet of it."""
        name = f"diffusion-{len(self.painters)}"
        bus, metrics, clock = self.broker.connect(), WorkerMetrics(), SystemClock()
        settings = RunnerSettings.model_validate({})
        engine = DiffusionEngine(model, metrics, name=PAINTER, caps=CAPS, policy=StepPolicy(slots, max_batch), lanes=64)
        cards = await engine.start()
        view = MirrorView(bus, clock, lease_s=3600.0)
        context = StageContext(
            identity=WorkerIdentity(
                worker_id=WorkerId(name),
                stage=Stage.DIFFUSION_GENERATE,
                pool=POOL,
                model=PAINTER,
                slots=slots,
                locality="memory",
                solo_from_delivery=3,
            ),
            bus=bus,
            store=self.store,
            clock=clock,
            settings=settings,
            view=view,
            metrics=metrics,
            stats=WorkerStats(slots, clock.monotonic_s()),
            outage=Outage(clock),
            joins=LazyBucket(bus, subjects.BUCKET_JOINS),
            random_ratio=lambda: 0.0,
        )
        runner = StageRunner(context, engine)
        await view.open(on_cancel=runner.cancel)
        worker = Painter(engine, bus, view, asyncio.create_task(runner.run()), metrics)
        self.painters.append(worker)
        await self._tell(name, cards)
        await eventually(lambda: self.ingress.view.catalog.has_worker(Stage.DIFFUSION_GENERATE, PAINTER))
        return worker

    async def reader(self) -> None:
        """Start the worker that decodes the pictures to edit; `painter` tells the fleet of it too."""
        bus, clock, metrics = self.broker.connect(), SystemClock(), WorkerMetrics()
        engine = PicturePreprocessEngine(PAINTER, MediaLimits())
        cards = await engine.start()
        view = MirrorView(bus, clock, lease_s=3600.0)
        context = StageContext(
            identity=WorkerIdentity(
                worker_id=WorkerId("preprocess-0"),
                stage=Stage.PREPROCESS,
                pool=READER_POOL,
                model=PAINTER,
                slots=2,
                locality="memory",
                solo_from_delivery=2,
            ),
            bus=bus,
            store=self.store,
            clock=clock,
            settings=RunnerSettings.model_validate({}),
            view=view,
            metrics=metrics,
            stats=WorkerStats(2, clock.monotonic_s()),
            outage=Outage(clock),
            joins=LazyBucket(bus, subjects.BUCKET_JOINS),
            random_ratio=lambda: 0.0,
        )
        runner = StageRunner(context, engine)
        await view.open(on_cancel=runner.cancel)
        self.readers.append(Painter(engine, bus, view, asyncio.create_task(runner.run()), metrics))
        await self._tell("preprocess-0", cards, Stage.PREPROCESS, READER_POOL)

    async def _tell(
        self, name: str, cards: tuple[ModelCard, ...], stage: Stage = Stage.DIFFUSION_GENERATE, pool_name: str = POOL
    ) -> None:
        bus = self.broker.connect()
        info = WorkerInfo(
            worker_id=WorkerId(name),
            stage=stage,
            pool=pool_name,
            host="test",
            pid=1,
            state="ready",
            slots=8,
            locality="memory",
            cards=cards,
            accepted_tags=codec.ACCEPTED_TAGS,
        )
        registry = await bus.kv(subjects.BUCKET_REGISTRY)
        await registry.put(f"worker.{stage.value}.{name}", codec.encode(info), ttl_s=3600)
        if stage is Stage.PREPROCESS:
            return
        pool = PoolRoute(pool=POOL, weight_ratio=1.0, locality="memory")
        reader = PoolRoute(pool=READER_POOL, weight_ratio=1.0, locality="memory")
        table = RoutingTable(
            revision=1,
            made_unix_s=0.0,
            policy="static",
            routes=(
                Route(stage=Stage.PREPROCESS, model=PAINTER, pools=(reader,)),
                Route(stage=Stage.DIFFUSION_GENERATE, model=PAINTER, pools=(pool,)),
            ),
            models=(*cards, ModelCard(model=TEXT_MODEL)),
        )
        await (await bus.kv(subjects.BUCKET_ROUTING)).put(subjects.ROUTING_KEY, codec.encode(table))


@asynccontextmanager
async def picture_fleet(*models: PictureModel, slots: int = 8, **settings: object) -> AsyncIterator[PictureFleet]:
    """A fleet with a worker per model; `settings` are fields of IngressSettings."""
    broker = MemoryBroker(registry_ttl_s=3600.0)
    store = memory_store()
    own = IngressSettings.model_validate({"http_port": 0, **settings})
    async with (
        prepare_ingress(own, broker.connect(), store, SystemClock()) as ingress,
        served(ingress) as url,
    ):
        fleet = PictureFleet(broker, store, ingress, url)
        try:
            await fleet.reader()
            for model in models:
                await fleet.painter(model, slots=slots)
            yield fleet
        finally:
            for painter in (*fleet.painters, *fleet.readers):
                await painter.kill()
