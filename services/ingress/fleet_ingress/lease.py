"""The ingress's lease in the registry: work that is no job dies with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from fleet_common.bus.port import Bus, KeyValue
from fleet_common.clock import Clock
from fleet_common.errors import BusError
from fleet_contracts import codec, subjects
from fleet_contracts.control import IngressInfo

log = structlog.get_logger(__name__)

_RENEWALS_PER_LEASE = 3


@contextlib.asynccontextmanager
async def hold_lease(bus: Bus, clock: Clock, info: IngressInfo, lease_s: float) -> AsyncIterator[None]:
    """Be registered while the block runs. Raises BusError when the registry cannot be reached at first."""
    registry = await bus.kv(subjects.BUCKET_REGISTRY)
    key = f"ingress.{info.ingress_id}"
    value = codec.encode(info)
    await registry.put(key, value, ttl_s=lease_s)
    async with asyncio.TaskGroup() as group:
        renewal = group.create_task(_renew_for_ever(registry, clock, key, value, lease_s))
        try:
            yield
        finally:
            renewal.cancel()
    try:
        await registry.delete(key)
    except BusError as err:
        # The lease runs out by itself.
        log.debug("lease_not_given_back", code=err.code)


async def _renew_for_ever(registry: KeyValue, clock: Clock, key: str, value: bytes, lease_s: float) -> None:
    while True:
        await clock.sleep(lease_s / _RENEWALS_PER_LEASE)
        try:
            await registry.put(key, value, ttl_s=lease_s)
        except BusError as err:
            log.warning("lease_not_renewed", code=err.code)
