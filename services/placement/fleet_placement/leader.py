"""The leader lease: one key in KV, made and renewed by compare-and-set."""

from __future__ import annotations

import msgspec
import structlog

from fleet_common.bus.port import KeyValue
from fleet_common.clock import Clock
from fleet_common.errors import BusError, FleetError, RevisionConflictError
from fleet_contracts import codec, subjects
from fleet_contracts.control import LeaderInfo

log = structlog.get_logger(__name__)


class LeadershipLostError(FleetError):
    """Another instance leads, or may by now."""

    code = "leadership_lost"


class Leadership:
    """This instance's part in the contest for the lease."""

    def __init__(self, bucket: KeyValue, info: LeaderInfo, lease_s: int, clock: Clock) -> None:
        self._bucket = bucket
        self._info = info
        self._lease_s = lease_s
        self._clock = clock
        self._revision = 0
        self._renewed_s = 0.0

    async def acquire(self) -> None:
        """Wait until this instance leads."""
        while True:
            asked_s = self._clock.monotonic_s()
            info = msgspec.structs.replace(self._info, since_unix_s=self._clock.unix_s())
            try:
                self._revision = await self._bucket.create(
                    subjects.LEADER_KEY, codec.encode(info), ttl_s=float(self._lease_s)
                )
            except RevisionConflictError:
                log.debug("leadership_taken")
            except BusError as err:
                log.debug("leadership_unknown", error=str(err))
            else:
                self._info, self._renewed_s = info, asked_s
                return
            await self._clock.sleep(self._lease_s / 3)

    async def keep(self) -> None:
        """Renew three times per lease, for ever.

        Raises:
            LeadershipLostError: somebody else has the lease, or it ended because the broker was out of reach.
        """
        while True:
            await self._clock.sleep(self._lease_s / 3)
            asked_s = self._clock.monotonic_s()
            try:
                await self._renew()
            except BusError as err:
                # Counted from when the last renewal was asked for: the broker's clock started no earlier.
                if self._clock.monotonic_s() - self._renewed_s >= self._lease_s:
                    raise LeadershipLostError("the lease ended while the broker was out of reach") from err
            else:
                self._renewed_s = asked_s

    async def _renew(self) -> None:
        value = codec.encode(self._info)
        try:
            self._revision = await self._bucket.update(
                subjects.LEADER_KEY, value, self._revision, ttl_s=float(self._lease_s)
            )
        except RevisionConflictError as err:
            entry = await self._bucket.get(subjects.LEADER_KEY)
            if entry is None or entry.value != value:
                raise LeadershipLostError("another instance holds the lease, or it ended") from err
            # Our own renewal whose answer was lost.
            self._revision = entry.revision

    async def resign(self) -> None:
        """Let the next instance lead at once. Best effort: the lease ends by itself."""
        try:
            entry = await self._bucket.get(subjects.LEADER_KEY)
            if entry is not None and entry.value == codec.encode(self._info):
                await self._bucket.delete(subjects.LEADER_KEY)
        except BusError as err:
            log.debug("leadership_not_resigned", error=str(err))
