"""Helpers of tests that run against any bus: a fleet of one decode pool, inboxes, waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from fleet_common.bus.port import Bus, BusAdmin, Pull, WorkMessage
from fleet_common.bus.topology import TopologyLimits
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec

POOL = "decode-cpu"
LANE = "w-d0"
SPEC = FleetSpec(pools=(PoolSpec(stage=Stage.DECODE, pool=POOL, model="m", workers=(WorkerId("d0"),)),))
SUBJECT = subjects.work(Stage.DECODE, POOL, PriorityClass.REALTIME)
LIMITS = TopologyLimits(ack_wait_s=0.45, max_deliver=2, max_msgs=20)


class AdminBus(Bus, BusAdmin, Protocol):
    """Both ports, which both adapters have."""


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until it holds; fails after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)


@dataclass
class Rig:
    """A broker with the fleet's topology; `connect` gives the bus of one more process."""

    connect: Callable[[], Awaitable[AdminBus]]
    buses: list[AdminBus] = field(default_factory=list)

    async def bus(self) -> AdminBus:
        bus = await self.connect()
        self.buses.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


@dataclass
class Inbox:
    """What a pull got."""

    pull: Pull
    messages: list[WorkMessage]

    async def first(self, count: int = 1, timeout_s: float = 10.0) -> list[WorkMessage]:
        await eventually(lambda: len(self.messages) >= count, timeout_s)
        return self.messages

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]


async def pulling(bus: Bus, want: int, lane: str = "any") -> Inbox:
    messages: list[WorkMessage] = []
    pull = await bus.pull(Stage.DECODE, POOL, PriorityClass.REALTIME, lane, messages.append)
    pull.want(want)
    return Inbox(pull, messages)


async def put(bus: Bus, name: str, ttl_s: float = 60.0, subject: str = SUBJECT) -> bool:
    return await bus.publish_work(subject, name.encode(), message_id=name, ttl_s=ttl_s)
