"""The work a worker holds: every delivery that is not settled yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from fleet_common.bus.port import WorkMessage
from fleet_common.stage.plan import WantedTensor
from fleet_common.tensors.port import Array, Lease
from fleet_contracts.base import StepId
from fleet_contracts.events import Attempt
from fleet_contracts.work import StepTask


class OverReason(StrEnum):
    """Why nobody waits for an attempt any longer."""

    CANCELLED = "cancelled"
    GONE = "gone"
    LATE = "late"
    STALE = "stale"
    SUPERSEDED = "superseded"
    SETTLED = "settled"


@dataclass(slots=True, eq=False)
class Held:
    """One delivery of a step, from its arrival until it is settled.

    Attributes:
        message: the newest delivery's handle; what is heart-beaten and settled.
        attempt: who speaks in events: fixed at the first arrival.
        arrived_s: monotonic second of arrival.
        beaten_s: monotonic second of the last heartbeat.
        is_doubtful: this process was frozen for longer than the ack timer: the broker may have given the step to
            somebody else.
        fence_epoch: epoch of the attempt that outranked this one, as far as the ingress told.
        over: set once nobody waits for it; `over_reason` says why.
        pulse: shows the ingress that the attempt lives; set once it has started.
        tensors, root, leases: opened inputs.
    """

    message: WorkMessage
    task: StepTask
    attempt: Attempt
    wanted: tuple[WantedTensor, ...]
    arrived_s: float
    arrived_unix_s: float
    beaten_s: float
    is_doubtful: bool = False
    fence_epoch: int | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    over_reason: OverReason | None = None
    tensors: dict[tuple[str, str], Array] = field(default_factory=dict)
    root: bytes = b""
    leases: list[Lease] = field(default_factory=list)
    bytes_in: int = 0
    bytes_out: int = 0
    batch_size: int = 1
    started_unix_s: float = 0.0
    service_s: float = 0.0
    pulse: Callable[[], Awaitable[None]] | None = None

    @property
    def key(self) -> tuple[str, StepId]:
        """What a worker holds at most one attempt of."""
        return (self.task.request_id, self.task.step_id)

    @property
    def cost_bytes(self) -> int:
        """Bytes of what the step reads."""
        root = self.task.root
        return sum(want.ref.nbytes for want in self.wanted) or (root.nbytes if root is not None else 0)

    @property
    def is_over(self) -> bool:
        """True once nobody waits for it."""
        return self.over_reason is not None

    @property
    def is_abandoned(self) -> bool:
        """True once not even an error has anybody to be told to; false for work that is merely late."""
        return self.over_reason not in (None, OverReason.LATE)

    def end(self, reason: OverReason) -> None:
        """Nobody waits for this attempt any longer; the first reason stays."""
        if self.over_reason is None:
            self.over_reason = reason
            self.over.set()

    def outranked(self, fence_epoch: int | None) -> None:
        """Another attempt holds the step."""
        self.fence_epoch = fence_epoch
        self.end(OverReason.STALE)

    def close_inputs(self) -> None:
        """Give the views back. Idempotent."""
        leases, self.leases = self.leases, []
        self.tensors = {}
        for lease in leases:
            lease.close()


class Arrival(Enum):
    """What a new delivery is to what is held already."""

    NEW = "new"
    ADOPTED = "adopted"
    REPLACES = "replaces"
    OUTRANKED = "outranked"


def judge(held: Held | None, *, epoch: int, delivery: int) -> Arrival:
    """Decide about a delivery of a step this worker may hold already.

    The next delivery of the very message we run (the broker lost our heartbeats for a while) is adopted: the run goes
    on and settles it. With a delivery in between somebody else may have taken the stream over: ours is replaced.
    """
    if held is None:
        return Arrival.NEW
    current = held.task.epoch
    if epoch < current:
        return Arrival.OUTRANKED
    if epoch > current:
        return Arrival.REPLACES
    if delivery <= held.message.delivery:
        return Arrival.OUTRANKED
    return Arrival.ADOPTED if delivery == held.message.delivery + 1 and not held.is_over else Arrival.REPLACES


#: Finished steps remembered, in case their acks are lost.
_MAX_FINISHED = 4096


class HeldSteps:
    """All of them, by request and step; and the steps finished lately."""

    def __init__(self) -> None:
        self._finished: dict[tuple[str, StepId, int], None] = {}
        self._by_key: dict[tuple[str, StepId], Held] = {}
        self._replaced: set[Held] = set()

    def __len__(self) -> int:
        return len(self._by_key) + len(self._replaced)

    def __iter__(self) -> Iterator[Held]:
        yield from list(self._by_key.values())
        yield from list(self._replaced)

    def get(self, key: tuple[str, StepId]) -> Held | None:
        """The attempt held of a step."""
        return self._by_key.get(key)

    def add(self, held: Held) -> None:
        """Hold it; an attempt it replaces stays until it is discarded itself."""
        old = self._by_key.get(held.key)
        if old is not None:
            self._replaced.add(old)
        self._by_key[held.key] = held

    def add_outranked(self, held: Held) -> None:
        """Hold an attempt beside the better one of its step, until it is acked."""
        self._replaced.add(held)

    def discard(self, held: Held) -> None:
        """Settled."""
        self._replaced.discard(held)
        if self._by_key.get(held.key) is held:
            del self._by_key[held.key]

    def finish(self, held: Held) -> None:
        """Everything that follows it is published: another delivery of it has nothing to do."""
        while len(self._finished) >= _MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        self._finished[(*held.key, held.task.epoch)] = None

    def is_finished(self, task: StepTask) -> bool:
        """Whether this very step was finished here."""
        return (task.request_id, task.step_id, task.epoch) in self._finished

    def __contains__(self, held: Held) -> bool:
        return self._by_key.get(held.key) is held or held in self._replaced

    def of_request(self, request_id: str) -> list[Held]:
        """Every attempt of a request."""
        return [held for held in self if held.task.request_id == request_id]
