"""What happens to placement, and what it wants done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import RoutingTable, Telemetry, WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A registry entry was written: a worker joined, changed or renewed its lease."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A registry entry went away: the worker left or its lease ended."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class TelemetryReceived:
    """A worker's report, as it came."""

    report: Telemetry


@dataclass(frozen=True, slots=True)
class BacklogMeasured:
    """What the broker holds.

    Attributes:
        pending: items no worker holds, per pool.
        unsettled: pools with any item left, those held by workers included.
    """

    pending: Mapping[tuple[Stage, str], int]
    unsettled: frozenset[tuple[Stage, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelWanted:
    """An operator said whether a model is to be served: one that is not leaves the table with its last worker."""

    model: str
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class Leading:
    """This instance became the leader; `table` is the one in force, None when there never was one."""

    table: RoutingTable | None


@dataclass(frozen=True, slots=True)
class Deposed:
    """This instance leads no longer: it goes on watching and publishes nothing."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The broker was out of reach: leases may have ended though their workers live."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    WorkerSeen | WorkerGone | TelemetryReceived | BacklogMeasured | ModelWanted | Leading | Deposed | Interrupted | Tick
)


@dataclass(frozen=True, slots=True)
class PublishTable:
    """Put this table in force; whoever applies it sets `made_unix_s`."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class ReportDoubted:
    """Something in a worker's reports was dropped; said once until its reports are sound again."""

    worker_id: WorkerId
    reasons: tuple[str, ...]


Effect = PublishTable | ReportDoubted
