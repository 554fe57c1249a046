"""What placement knows, and the config it decides by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import ModelCard, RoutingTable, WorkerInfo
from fleet_placement.core.measure import Measured
from fleet_placement.core.policies.port import Policy

RouteKey = tuple[Stage, str]

#: The state of a worker that takes work.
READY = "ready"


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How to decide. Seconds unless the name says otherwise.

    Attributes:
        interval_s: between two tables that differ only in measured load.
        stale_s: age of a worker's last report above which its part shrinks.
        silent_s: age at which its part is zero.
        half_life_s: of the smoothing of service times.
        share_change_ratio: parts that moved less than this are not worth a table.
        grace_s: after an interruption, how long nobody is taken for dead.
        gone_settle_s: how long a lease must be away before its worker is.
        forget_s: how long a pool without any worker stays known (its queue stays usable meanwhile).
    """

    policy: Policy
    interval_s: float = 5.0
    stale_s: float = 3.0
    silent_s: float = 4.0
    half_life_s: float = 1.5
    share_change_ratio: float = 0.03
    grace_s: float = 8.0
    gone_settle_s: float = 0.4
    forget_s: float = 600.0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker.

    Attributes:
        joined_s: when it was first seen.
        gone_s: when its lease went away; None while it stands.
        doubted: its latest report had something dropped.
    """

    info: WorkerInfo
    joined_s: float
    measured: Measured | None = None
    gone_s: float | None = None
    doubted: bool = False

    @property
    def is_ready(self) -> bool:
        """Takes work, as far as it says itself."""
        return self.info.state == READY

    def last_heard_s(self) -> float:
        """When it last reported, or joined."""
        return self.measured.received_s if self.measured is not None else self.joined_s


@dataclass(frozen=True, slots=True)
class KnownPool:
    """A pool that serves or served a route; remembered while its workers are away.

    Attributes:
        card: what its workers said of the model.
        seen_s: when it last had a worker.
    """

    card: ModelCard
    locality: str
    seen_s: float


@dataclass(frozen=True, slots=True)
class PlacementState:
    """Everything placement knows; mappings are never changed in place.

    Attributes:
        table: the table in force.
        told_service_s: service time per worker when the table in force was made, or first measured since.
        next_table_s: earliest time of the next table that only follows load.
        hold_until_s: until then no table may take a worker out.
        listening_since_s: silence before that was ours, not the workers'.
        unwanted: models an operator took off.
    """

    workers: Mapping[WorkerId, WorkerRecord] = field(default_factory=dict)
    pools: Mapping[RouteKey, Mapping[str, KnownPool]] = field(default_factory=dict)
    pending: Mapping[tuple[Stage, str], int] = field(default_factory=dict)
    unsettled: frozenset[tuple[Stage, str]] = frozenset()
    is_leading: bool = False
    table: RoutingTable | None = None
    told_service_s: Mapping[WorkerId, float] = field(default_factory=dict)
    next_table_s: float = 0.0
    hold_until_s: float = 0.0
    listening_since_s: float = 0.0
    unwanted: frozenset[str] = frozenset()

    def silence_s(self, record: WorkerRecord, now_s: float) -> float:
        """How long a worker has not reported while somebody listened."""
        return now_s - max(record.last_heard_s(), self.listening_since_s)
