"""What the mover decides: which queues are stranded, where their items go, what a given-up item becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleet_common.scheduling.route import refusing_pools
from fleet_contracts.base import ANY_LANE, PriorityClass, Stage, WorkerId
from fleet_contracts.events import Attempt
from fleet_contracts.work import MOVE_STRIDE, StepTask, TaskHead
from fleet_placement.core.state import PlacementState, WorkerRecord

_LANE_PREFIX = "w-"

#: Who speaks in events the mover sends.
MOVER = WorkerId("mover")

#: How long past its deadline an item stays in a stream, so that whoever meets it can say that it was late.
AFTERLIFE_S = 60.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """A durable consumer with something in it.

    Attributes:
        num_items: stored and not settled.
    """

    stage: Stage
    pool: str
    priority_class: PriorityClass
    lane: str
    num_items: int


@dataclass(frozen=True, slots=True)
class Stranded:
    """A queue nobody pulls from, though its items could be run elsewhere.

    Attributes:
        reason: `lane` (its worker is gone) or `pool` (no worker of the pool lives).
    """

    backlog: Backlog
    reason: str


def stranded(state: PlacementState, backlogs: Sequence[Backlog], now_s: float) -> tuple[Stranded, ...]:
    """Queues to empty now; none while it is uncertain who lives."""
    if now_s < state.hold_until_s:
        return ()
    found = []
    for backlog in backlogs:
        if backlog.num_items <= 0:
            continue
        if _is_lane_dead(state, backlog.lane):
            found.append(Stranded(backlog=backlog, reason="lane"))
        elif not _live_workers(state, backlog.stage, backlog.pool) and _is_served_elsewhere(state, backlog):
            found.append(Stranded(backlog=backlog, reason="pool"))
    return tuple(found)


def _is_lane_dead(state: PlacementState, lane: str) -> bool:
    return lane.startswith(_LANE_PREFIX) and WorkerId(lane.removeprefix(_LANE_PREFIX)) not in state.workers


def _live_workers(state: PlacementState, stage: Stage, pool: str) -> list[WorkerRecord]:
    """Registered workers, those paused or draining included: they still hold work of the pool."""
    return [record for record in state.workers.values() if (record.info.stage, record.info.pool) == (stage, pool)]


def _is_served_elsewhere(state: PlacementState, backlog: Backlog) -> bool:
    """Every model of the pool has another pool, so that nothing is taken out of the queue in vain."""
    models = [
        model for (stage, model), pools in state.pools.items() if stage == backlog.stage and backlog.pool in pools
    ]
    return bool(models) and all(_other_pool(state, backlog.stage, model, backlog.pool) for model in models)


def _other_pool(
    state: PlacementState, stage: Stage, model: str, pool: str, tags: frozenset[str] = frozenset()
) -> str | None:
    """The pool with the most ready slots that serves the model and can read `tags`, other than `pool`."""
    slots: dict[str, int] = {}
    for record in state.workers.values():
        serves = any(card.model == model for card in record.info.cards)
        if record.is_ready and record.gone_s is None and serves and record.info.stage == stage:
            slots[record.info.pool] = slots.get(record.info.pool, 0) + record.info.slots
    for refusing in (pool, *refusing_pools((record.info for record in state.workers.values()), stage, tags)):
        slots.pop(refusing, None)
    return max(sorted(slots), key=lambda name: slots[name]) if slots else None


def target_pool(state: PlacementState, source: Stranded, model: str, tags: frozenset[str] = frozenset()) -> str | None:
    """Where an item of a stranded queue goes; None: it has to wait where it is.

    Args:
        tags: what its workers must be able to read (`Plan.later_tags`).
    """
    stage, pool = source.backlog.stage, source.backlog.pool
    if _live_workers(state, stage, pool):
        return pool
    other = _other_pool(state, stage, model, pool, tags)
    if other is None and source.reason == "lane":
        # No worker of the pool now, but any that comes may run it; nobody will ever pull from the dead lane.
        return pool
    return other


def moved(task: StepTask, now_unix_s: float) -> StepTask:
    """The same step for any worker, at an epoch that outranks what may still run."""
    return msgspec.structs.replace(task, epoch=task.epoch + MOVE_STRIDE, lane=ANY_LANE, enqueued_unix_s=now_unix_s)


def life_s(task: StepTask, now_unix_s: float) -> float:
    """Seconds a copy made now may stay in its stream; 0 when the deadline has passed."""
    left_s = task.deadline_unix_s - now_unix_s
    return left_s + AFTERLIFE_S if left_s > 0.0 else 0.0


def giving_up(task: TaskHead, stage: Stage) -> Attempt:
    """The attempt in whose name the mover tells the ingress that a step is given up: it outranks those that died."""
    return Attempt(
        request_id=task.request_id,
        step_id=task.step_id,
        stage=stage,
        worker_id=MOVER,
        epoch=task.epoch + MOVE_STRIDE,
        delivery=1,
    )
