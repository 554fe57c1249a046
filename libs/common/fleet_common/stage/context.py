"""What every part of the stage runner stands on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleet_common.bus.port import Bus
from fleet_common.clock import Clock
from fleet_common.settings import RunnerSettings
from fleet_common.stage.bucket import LazyBucket
from fleet_common.stage.outage import Outage
from fleet_common.stage.stats import WorkerStats
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.tensors.port import TensorStore
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import RoutingTable
from fleet_contracts.work import DeadLetter


class WorkerBus(Bus, Protocol):
    """The bus as a worker needs it."""

    async def publish_dead(self, stage: Stage, letter: DeadLetter) -> None:
        """Store a dead letter on `subjects.dead(stage)`."""


class FleetView(Protocol):
    """What a worker knows of the rest of the fleet without asking: mirrors only, never a round trip."""

    @property
    def table(self) -> RoutingTable | None:
        """The routing table in force; None before placement ever published one."""

    def refusing_pools(self, stage: Stage, tags: frozenset[str]) -> frozenset[str]:
        """Pools of a stage that work with these tags must not reach: a worker there is of an older release."""

    def is_cancelled(self, request_id: str) -> bool:
        """A tombstone or a broadcast says so."""

    def is_ingress_gone(self, ingress_id: str) -> bool:
        """Its lease has been absent for longer than a hiccup of the control plane can explain."""

    def adapter_holders(self, stage: Stage, pool: str, adapter: str) -> frozenset[WorkerId]:
        """Ready workers of a pool that have a LoRA adapter in memory and pull from a lane of their own."""

    async def has_tombstone(self, request_id: str) -> bool:
        """Ask the bucket itself: this process may never have heard of a cancel before a redelivery. Raises BusError."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is.

    Attributes:
        locality: domain of its shared-memory arena.
        has_own_lane: `fleet bus apply` knows this worker by name.
        solo_from_delivery: a delivery at or above it of a task in company is published again to run alone.
    """

    worker_id: WorkerId
    stage: Stage
    pool: str
    model: str
    slots: int
    locality: str
    solo_from_delivery: int = 2
    has_own_lane: bool = True


@dataclass(frozen=True, slots=True)
class StageContext:
    """The runner's surroundings; tests put fakes here.

    Attributes:
        random_ratio: a number in [0, 1) per call: which pool of a route gets the next step.
    """

    identity: WorkerIdentity
    bus: WorkerBus
    store: TensorStore
    clock: Clock
    settings: RunnerSettings
    view: FleetView
    metrics: WorkerMetrics
    stats: WorkerStats
    outage: Outage
    joins: LazyBucket
    random_ratio: Callable[[], float]
