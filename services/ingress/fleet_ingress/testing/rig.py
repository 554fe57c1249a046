"""A whole ingress in one process: memory bus, memory store, scripted workers, real HTTP on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fleet_common.bus.memory import MemoryBroker
from fleet_common.bus.memory_work import WorkLimits
from fleet_common.clock import SystemClock
from fleet_common.tensors.factory import memory_store
from fleet_common.tensors.router import FleetTensorStore
from fleet_ingress.app import create_asgi
from fleet_ingress.context import Ingress
from fleet_ingress.lifecycle import prepare_ingress
from fleet_ingress.server import EdgeServer, listen, make_server
from fleet_ingress.settings import IngressSettings
from fleet_ingress.testing.script import Script
from fleet_ingress.testing.workers import ScriptedFleet

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class IngressRig:
    """An ingress that answers on `url`."""

    ingress: Ingress
    fleet: ScriptedFleet
    broker: MemoryBroker
    store: FleetTensorStore
    url: str

    def knows_fleet(self) -> bool:
        """Whether the ingress has seen models and workers."""
        catalog = self.ingress.view.catalog
        return bool(catalog.cards()) and not catalog.missing()


@asynccontextmanager
async def open_rig(
    script: Callable[[Mapping[str, object]], Script] | None = None,
    limits: WorkLimits | None = None,
    broker: MemoryBroker | None = None,
    store_bytes: int = 0,
    **settings: object,
) -> AsyncIterator[IngressRig]:
    """Start everything on a free port; `settings` are fields of IngressSettings."""
    broker = broker or MemoryBroker(limits=limits, registry_ttl_s=3600.0)
    store = memory_store(capacity_bytes=store_bytes)
    fleet = ScriptedFleet(broker, store)
    if script is not None:
        fleet.script = script
    own = IngressSettings.model_validate({"http_port": 0, **settings})
    async with (
        fleet.running(),
        prepare_ingress(own, broker.connect(), store, SystemClock()) as ingress,
        served(ingress) as url,
    ):
        rig = IngressRig(ingress, fleet, broker, store, url)
        await eventually(rig.knows_fleet)
        yield rig


@asynccontextmanager
async def served(ingress: Ingress) -> AsyncIterator[str]:
    """Serve an ingress over HTTP while the block runs; gives the URL."""
    listener = listen(ingress.settings)
    server: EdgeServer = make_server(create_asgi(ingress), ingress.settings)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # uvicorn's own way out takes 0.2 s, which adds up over a suite.
            serving.cancel()
            for acceptor in server.servers:
                acceptor.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(_POLL_S)
