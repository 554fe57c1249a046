"""The composition root: what an ingress is made of, and its whole life from start to drain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from fleet_common.bus.nats import connect_bus
from fleet_common.bus.port import Bus
from fleet_common.clock import Clock, SystemClock
from fleet_common.ids import new_ingress_id
from fleet_common.settings import CommonSettings
from fleet_common.telemetry.names import BusCollector, IngressMetrics
from fleet_common.tensors.factory import open_store
from fleet_common.tensors.port import TensorStore
from fleet_common.tensors.spill import bus_spill, serve_spill
from fleet_common.tensors.tend import tend
from fleet_contracts.control import IngressInfo
from fleet_ingress.app import bind, create_asgi, route_paths
from fleet_ingress.context import Ingress
from fleet_ingress.core.admission import AdmissionLimits
from fleet_ingress.dispatcher import Dispatcher
from fleet_ingress.gate import Gate
from fleet_ingress.idempotency import IdempotentAnswers
from fleet_ingress.jobs.desk import JobDesk
from fleet_ingress.jobs.driver import DriverParts, JobDriver
from fleet_ingress.jobs.inprocess import InProcess
from fleet_ingress.jobs.origin import JobOrigin
from fleet_ingress.jobs.store import JobStore
from fleet_ingress.lease import hold_lease
from fleet_ingress.picture_links import PictureLinks
from fleet_ingress.pipelines.shelf import PipelineShelf
from fleet_ingress.publisher import Fleet
from fleet_ingress.server import EdgeServer, listen, make_server
from fleet_ingress.settings import IngressSettings
from fleet_ingress.view import FleetView

log = structlog.get_logger(__name__)

_POLL_S = 0.05


@asynccontextmanager
async def prepare_ingress(
    settings: IngressSettings, bus: Bus, store: TensorStore, clock: Clock
) -> AsyncIterator[Ingress]:
    """An ingress on an open bus and store, listening for events while the block runs. Raises BusError."""
    metrics = IngressMetrics()
    view = FleetView(bus)
    await view.start()
    fleet = Fleet(bus=bus, store=store, view=view, clock=clock, metrics=metrics)
    dispatcher = Dispatcher(new_ingress_id(), fleet, settings)
    limits = AdmissionLimits(settings.max_inflight_requests, settings.max_buffered_bytes)
    answers = IdempotentAnswers(
        clock,
        ttl_s=settings.idempotency_ttl_s,
        max_answers=settings.max_idempotent_answers,
        max_bytes=settings.max_idempotent_bytes,
    )
    gate = Gate(limits, metrics)
    jobs = JobDesk(JobStore(bus), clock, settings)
    shelf = PipelineShelf(settings.pipelines_dir, clock)
    parts = DriverParts(dispatcher.ingress_id, jobs.store, clock, metrics, settings, lambda: gate.is_stopping)
    ingress = Ingress(
        settings=settings,
        dispatcher=dispatcher,
        view=view,
        gate=gate,
        answers=answers,
        jobs=jobs,
        links=PictureLinks(bus, clock, settings),
        pipelines=shelf,
        metrics=metrics,
        clock=clock,
    )
    try:
        await jobs.store.open()
        await ingress.links.open()
        lines = InProcess(bind(ingress), route_paths(), JobOrigin(settings.job_line_timeout_s))
        jobs.endpoints = lines.endpoints
        async with (
            dispatcher.running(),
            answers.running(),
            shelf.following(),
            JobDriver(parts).running(lines),
        ):
            yield ingress
    finally:
        await view.stop()


async def run_ingress(common: CommonSettings, settings: IngressSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises OSError when the port is taken, BusError without a broker."""
    listener = listen(settings)
    clock = SystemClock()
    bus = await connect_bus(common.bus, "ingress")
    try:
        store = await open_store(common.store, spill=bus_spill(bus), clock=clock)
        spill = await serve_spill(bus, store)
        try:
            async with prepare_ingress(settings, bus, store, clock) as ingress, asyncio.TaskGroup() as group:
                ingress.metrics.registry.register(BusCollector(lambda: bus.stats.for_metrics()))
                tending = group.create_task(tend(store, clock))
                await serve(ingress, bus, listener)
                tending.cancel()
        finally:
            await spill.stop()
            await store.close()
    finally:
        listener.close()
        await bus.close()


async def serve(ingress: Ingress, bus: Bus, listener: socket.socket) -> None:
    """Answer HTTP on `listener` until told to stop by a signal; accepted requests are finished first."""
    settings = ingress.settings
    host, port = listener.getsockname()[:2]
    url = settings.public_url or f"http://{host}:{port}"
    info = IngressInfo(ingress_id=ingress.dispatcher.ingress_id, host=socket.gethostname(), pid=os.getpid(), url=url)
    server = make_server(create_asgi(ingress), settings)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with hold_lease(bus, ingress.clock, info, settings.lease_s), asyncio.TaskGroup() as group:
        log.info("ingress_started", url=url, ingress_id=info.ingress_id)
        drain = group.create_task(_drain_when(stopping, ingress, server))
        await server.serve(sockets=[listener])
        drain.cancel()
    log.info("ingress_stopped", ingress_id=info.ingress_id)


async def _drain_when(stopping: asyncio.Event, ingress: Ingress, server: EdgeServer) -> None:
    await stopping.wait()
    await drain(ingress)
    server.should_exit = True


async def drain(ingress: Ingress) -> None:
    """Not ready at once, then no new work, then wait for what was accepted; at the end the rest is given up."""
    settings, gate = ingress.settings, ingress.gate
    gate.is_stopping = True
    log.info("drain_started", num_inflight=gate.num_inflight)
    await ingress.clock.sleep(settings.drain_delay_s)
    gate.is_draining = True
    give_up_s = ingress.clock.monotonic_s() + settings.drain_s
    while gate.num_inflight and ingress.clock.monotonic_s() < give_up_s:
        await ingress.clock.sleep(_POLL_S)
    log.info("drain_finished", num_given_up=len(ingress.dispatcher.live))
    ingress.dispatcher.abandon_all("server_stopping")
