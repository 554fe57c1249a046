"""The routing table in KV: read when this instance begins to lead, then written by compare-and-set only."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from fleet_common.bus.port import KeyValue
from fleet_common.clock import Clock
from fleet_common.errors import BusError, RevisionConflictError
from fleet_contracts import codec, subjects
from fleet_contracts.control import RoutingTable
from fleet_placement.leader import LeadershipLostError

log = structlog.get_logger(__name__)

_RETRY_S = 0.3


class TableWriter:
    """Writes tables on top of the revision it read, so that a deposed leader cannot overwrite its successor's."""

    def __init__(self, bucket: KeyValue, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._kv_revision = 0
        # While a write is under way, nobody can tell whose the table in KV is.
        self._writing = asyncio.Lock()

    async def read(self) -> RoutingTable | None:
        """The table in force; None when there is none that this release can read. Waits for the broker."""
        while True:
            try:
                entry = await self._bucket.get(subjects.ROUTING_KEY)
            except BusError as err:
                log.warning("table_read_delayed", error=str(err))
                await self._clock.sleep(_RETRY_S)
                continue
            self._kv_revision = entry.revision if entry else 0
            return _decoded(entry.value) if entry else None

    async def write(self, table: RoutingTable) -> None:
        """Put a table in force; waits for the broker as long as it takes.

        Raises:
            LeadershipLostError: another instance wrote since.
        """
        value = codec.encode(msgspec.structs.replace(table, made_unix_s=self._clock.unix_s()))
        while True:
            try:
                async with self._writing:
                    self._kv_revision = await self._put(value)
            except BusError as err:
                log.warning("table_write_delayed", revision=table.revision, error=str(err))
                await self._clock.sleep(_RETRY_S)
            else:
                return

    async def check(self) -> None:
        """See that the table in force is the one this instance read or wrote.

        Workers that start read the table from KV: one that was lost or overwritten there leaves them without.
        Raises:
            LeadershipLostError: it is another one, or gone.
            BusError: the broker is out of reach.
        """
        async with self._writing:
            entry = await self._bucket.get(subjects.ROUTING_KEY)
            if (entry.revision if entry else 0) != self._kv_revision:
                raise LeadershipLostError("the table in force is not the one this instance published")

    async def _put(self, value: bytes) -> int:
        try:
            if self._kv_revision == 0:
                return await self._bucket.create(subjects.ROUTING_KEY, value)
            return await self._bucket.update(subjects.ROUTING_KEY, value, self._kv_revision)
        except RevisionConflictError as err:
            entry = await self._bucket.get(subjects.ROUTING_KEY)
            if entry is None or entry.value != value:
                raise LeadershipLostError("another instance published a table") from err
            # Our own write whose answer was lost.
            return entry.revision


def _decoded(value: bytes) -> RoutingTable | None:
    try:
        return codec.decode_table(value)
    except codec.DecodeError:
        log.exception("table_undecodable", nbytes=len(value))
        return None
