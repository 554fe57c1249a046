"""Figures of the bus alone on a real broker: storing, delivering and settling work, beside a bare request and reply."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from fleet_common.bus.apply import apply
from fleet_common.bus.nats import NatsBus, connect_bus
from fleet_common.bus.port import BusMessage, WorkMessage
from fleet_common.settings import BusSettings
from fleet_common.testing.bus_rig import POOL, SPEC, SUBJECT
from fleet_common.testing.servers import nats_server
from fleet_contracts.base import PriorityClass, Stage
from loadtests.bench.figure import Figure

_NUM_WARM = 50
_NUM_ROUNDS = 500
_NUM_FLOOD = 3000
_IN_FLIGHT = 64
_PAYLOAD = b"x" * 1024
_ASK = "fleet.ask.bench"


def figures() -> list[Figure]:
    """Measure; a few seconds."""
    with nats_server() as server:
        return uvloop.run(_measure(server.url))


async def _measure(url: str) -> list[Figure]:
    settings = BusSettings(url=url)  # type: ignore[call-arg]
    await apply(settings, SPEC)
    near, far = await connect_bus(settings, "bench near"), await connect_bus(settings, "bench far")
    try:
        rig = await _Rig(near, far).open()
        request_us = await _p50_us(rig.ask)
        return [
            _beside(
                "bus_publish_to_worker_p50", await _p50_us(rig.deliver), request_us, "stored in JetStream, delivered"
            ),
            _beside("bus_publish_p50", await _p50_us(rig.store), request_us, "stored in JetStream, confirmed"),
            _beside("bus_ack_p50", await rig.ack_p50_us(), request_us, "settled, confirmed"),
            Figure(
                "bus_work_items_per_s", await rig.flood_per_s(), "1/s", note="published, delivered, settled; 64 at once"
            ),
        ]
    finally:
        await near.close()
        await far.close()


def _beside(name: str, value_us: float, request_us: float, note: str) -> Figure:
    return Figure(name, value_us, "us", request_us, value_us / request_us, f"{note}; beside request and reply")


async def _p50_us(once: Callable[[], Awaitable[float]]) -> float:
    """Median microseconds of a step that returns its seconds."""
    for _ in range(_NUM_WARM):
        await once()
    return statistics.median([await once() for _ in range(_NUM_ROUNDS)]) * 1e6


class _Rig:
    """A publisher, and a worker that settles what it gets."""

    def __init__(self, near: NatsBus, far: NatsBus) -> None:
        self._near = near
        self._far = far
        self._number = 0
        self._arrived: asyncio.Queue[tuple[WorkMessage, float]] = asyncio.Queue()

    async def open(self) -> _Rig:
        """Start the worker and the responder."""

        def on_message(message: WorkMessage) -> None:
            self._arrived.put_nowait((message, time.perf_counter()))
            pull.want(2 * _IN_FLIGHT)

        async def answer(message: BusMessage) -> None:
            await self._far.respond(message, message.payload)

        pull = await self._far.pull(Stage.DECODE, POOL, PriorityClass.REALTIME, "any", on_message)
        pull.want(2 * _IN_FLIGHT)
        await self._far.subscribe(_ASK, answer)
        return self

    async def ask(self) -> float:
        """A core request and its reply."""
        started_s = time.perf_counter()
        await self._near.request(_ASK, _PAYLOAD, timeout_s=5)
        return time.perf_counter() - started_s

    async def deliver(self) -> float:
        """Publish call to the worker's callback."""
        started_s = time.perf_counter()
        await self._publish()
        message, arrived_s = await self._arrived.get()
        await message.ack()
        return arrived_s - started_s

    async def store(self) -> float:
        """The publish call alone."""
        started_s = time.perf_counter()
        await self._publish()
        spent_s = time.perf_counter() - started_s
        message, _ = await self._arrived.get()
        await message.ack()
        return spent_s

    async def ack_p50_us(self) -> float:
        """The ack call alone."""
        spent_s = []
        for _ in range(_NUM_ROUNDS):
            await self._publish()
            message, _ = await self._arrived.get()
            started_s = time.perf_counter()
            await message.ack()
            spent_s.append(time.perf_counter() - started_s)
        return statistics.median(spent_s) * 1e6

    async def flood_per_s(self) -> float:
        """Items per second through publish, delivery and ack."""
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(_IN_FLIGHT):
                group.create_task(self._cycle(_NUM_FLOOD // _IN_FLIGHT))
        return (_NUM_FLOOD // _IN_FLIGHT) * _IN_FLIGHT / (time.perf_counter() - started_s)

    async def _cycle(self, count: int) -> None:
        for _ in range(count):
            await self._publish()
            message, _ = await self._arrived.get()
            await message.ack()

    async def _publish(self) -> None:
        self._number += 1
        await self._near.publish_work(SUBJECT, _PAYLOAD, message_id=str(self._number), ttl_s=60)
