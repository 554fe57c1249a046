"""The composition root: the only module that knows concrete classes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket

import structlog

from fleet_common.bus.nats import connect_bus
from fleet_common.clock import Clock, SystemClock
from fleet_common.errors import FleetError
from fleet_common.settings import CommonSettings
from fleet_common.telemetry.http import HealthServer
from fleet_common.telemetry.names import BusCollector, PlacementMetrics
from fleet_contracts import subjects
from fleet_contracts.control import LeaderInfo
from fleet_placement.core.policies import POLICIES
from fleet_placement.core.state import PlacementConfig
from fleet_placement.leader import Leadership
from fleet_placement.mover import PlacementBus
from fleet_placement.service import Parts, PlacementService
from fleet_placement.settings import PlacementSettings
from fleet_placement.tables import TableWriter

log = structlog.get_logger(__name__)


class UnknownPolicyError(FleetError):
    """`FLEET_PLACEMENT_POLICY` names no policy."""

    code = "unknown_policy"


def placement_config(settings: PlacementSettings) -> PlacementConfig:
    """How to decide, from settings. Raises UnknownPolicyError."""
    policy = POLICIES.get(settings.policy)
    if policy is None:
        raise UnknownPolicyError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {settings.policy!r}")
    return PlacementConfig(
        policy=policy,
        interval_s=settings.interval_s,
        stale_s=settings.telemetry_stale_s,
        silent_s=settings.telemetry_silent_s,
        share_change_ratio=settings.share_change_ratio,
        grace_s=settings.grace_s,
        forget_s=settings.forget_s,
    )


async def build_service(
    settings: PlacementSettings, bus: PlacementBus, metrics: PlacementMetrics, clock: Clock, url: str = ""
) -> PlacementService:
    """A service on a connected bus. Raises BusError when the buckets are missing."""
    info = LeaderInfo(
        instance_id=settings.instance_id or f"placement-{secrets.token_hex(4)}",
        host=socket.gethostname(),
        pid=os.getpid(),
        since_unix_s=0.0,
        url=url,
    )
    leadership = Leadership(await bus.kv(subjects.BUCKET_LEADER), info, settings.leader_lease_s, clock)
    tables = TableWriter(await bus.kv(subjects.BUCKET_ROUTING), clock)
    parts = Parts(bus=bus, leadership=leadership, tables=tables, metrics=metrics, clock=clock)
    return PlacementService(placement_config(settings), parts, sweep_s=settings.sweep_s, move_batch=settings.move_batch)


async def serve(common: CommonSettings, settings: PlacementSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises BusError when the broker cannot be reached or was not set up."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    metrics = PlacementMetrics()
    bus = await connect_bus(common.bus, "placement")
    metrics.registry.register(BusCollector(lambda: bus.stats.for_metrics()))
    try:
        url = f"http://{common.telemetry.metrics_host}:{common.telemetry.metrics_port}"
        service = await build_service(
            settings, bus, metrics, SystemClock(), url if common.telemetry.metrics_port else ""
        )
        health = HealthServer(metrics.registry, service.readiness)
        port = await health.start(common.telemetry.metrics_host, common.telemetry.metrics_port)
        log.info("placement_started", metrics_port=port, policy=settings.policy)
        try:
            await _run_until(service, stopping)
        finally:
            await health.stop()
    finally:
        await bus.close()
    log.info("placement_stopped")


async def _run_until(service: PlacementService, stopping: asyncio.Event) -> None:
    """Run the service until told to stop, or until it fails."""
    running = asyncio.get_running_loop().create_task(service.run(), name="placement")
    stop = asyncio.get_running_loop().create_task(stopping.wait(), name="stop")
    try:
        await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        if not stopping.is_set():
            raise
