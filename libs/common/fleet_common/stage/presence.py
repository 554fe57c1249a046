"""What a worker tells the control plane: its lease in the registry, and a report every second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from fleet_common.bus.port import Bus
from fleet_common.clock import Clock
from fleet_common.errors import BusError
from fleet_common.stage.bucket import LazyBucket
from fleet_common.stage.waiting import wait_event
from fleet_contracts import codec, subjects
from fleet_contracts.control import Telemetry, WorkerInfo

log = structlog.get_logger(__name__)

_REPORT_S = 1.0


class Presence:
    """Keeps `worker.<stage>.<worker_id>` alive in the registry and sends telemetry.

    Args:
        info: the entry; `state` and `cards` are set by `update`.
        report: makes the report of this second.
    """

    def __init__(
        self, bus: Bus, clock: Clock, info: WorkerInfo, *, lease_s: float, report: Callable[[], Telemetry]
    ) -> None:
        self._bus = bus
        self._registry = LazyBucket(bus, subjects.BUCKET_REGISTRY)
        self._clock = clock
        self._info = info
        self._lease_s = lease_s
        self._report = report
        self._changed = asyncio.Event()
        bus.on_reconnect(self._reconnected)

    @property
    def info(self) -> WorkerInfo:
        """The entry as it is written next."""
        return self._info

    @property
    def key(self) -> str:
        """Registry key."""
        return f"worker.{self._info.stage.value}.{self._info.worker_id}"

    def update(self, info: WorkerInfo) -> None:
        """Write a changed entry at once."""
        if info != self._info:
            log.info("worker_state_changed", state=info.state, was=self._info.state)
            self._info = info
            self._changed.set()

    def set_state(self, state: str) -> None:
        """Write another state at once."""
        self.update(msgspec.structs.replace(self._info, state=state))

    async def keep(self) -> None:
        """Renew the lease three times per span, for ever."""
        is_first = True
        while True:
            self._changed.clear()
            try:
                bucket = await self._registry.open()
                await bucket.put(self.key, codec.encode(self._info), self._lease_s)
                if is_first:
                    is_first = False
                    log.info("worker_lease_taken", state=self._info.state, lease_s=self._lease_s)
            except BusError as error:
                log.info("lease_not_renewed", code=error.code, reason=str(error))
            await wait_event(self._clock, self._changed, self._lease_s / 3)

    async def tell(self) -> None:
        """Send a report every second, for ever."""
        while True:
            await self._clock.sleep(_REPORT_S)
            subject = subjects.telemetry(self._info.stage, self._info.worker_id)
            try:
                await self._bus.publish(subject, codec.encode(self._report()))
            except BusError as error:
                log.debug("telemetry_not_sent", code=error.code)

    async def leave(self) -> None:
        """Remove the entry. Best effort: the lease ends by itself."""
        try:
            await (await self._registry.open()).delete(self.key)
        except BusError as error:
            log.info("lease_not_removed", code=error.code)

    async def _reconnected(self) -> None:
        self._changed.set()
