"""Publish work: to the pool the routing table names at this moment, until the broker has it."""

from __future__ import annotations

import msgspec

from fleet_common.errors import DependencyError
from fleet_common.scheduling.route import pick_lane, pick_pool, without_pools
from fleet_common.stage.context import StageContext
from fleet_common.stage.held import Held
from fleet_common.telemetry.tracing import carrier, stage_span
from fleet_contracts import codec, subjects
from fleet_contracts.base import ANY_LANE
from fleet_contracts.control import PoolRoute
from fleet_contracts.decode import DecodeParams
from fleet_contracts.work import PlanStep, StepTask

#: A message outlives its request's deadline by this much, so that its expiry is never what ends a request.
MESSAGE_GRACE_S = 60.0


def choose_pool(context: StageContext, step: PlanStep, tags: frozenset[str] = frozenset()) -> PoolRoute:
    """The pool for a step right now. Raises DependencyError while no table names one.

    Args:
        tags: what its workers must be able to read (`Plan.later_tags`).
    """
    table = context.view.table
    route = table.route(step.stage, step.model) if table is not None else None
    if route is not None:
        route = without_pools(route, context.view.refusing_pools(step.stage, tags))
    pool = pick_pool(route, context.random_ratio()) if route is not None else None
    if pool is None:
        raise DependencyError(f"no pool serves {step.stage.value} of {step.model}")
    return pool


def choose_lane(context: StageContext, step: PlanStep, pool: PoolRoute) -> str:
    """Where an adapter is in memory already, if it names one."""
    adapter = step.params.adapter if isinstance(step.params, DecodeParams) else ""
    if not adapter:
        return ANY_LANE
    holders = context.view.adapter_holders(step.stage, pool.pool, adapter)
    return pick_lane(pool, holders, context.random_ratio())


def locality_of(context: StageContext, steps: tuple[PlanStep, ...]) -> str | None:
    """The one locality in which every pool of every reader lies; None when they differ or are unknown."""
    table = context.view.table
    found: set[str] = set()
    for step in steps:
        route = table.route(step.stage, step.model) if table is not None else None
        if route is None or not route.pools:
            return None
        found.update(pool.locality for pool in route.pools if pool.weight_ratio > 0 or len(route.pools) == 1)
    return found.pop() if len(found) == 1 else None


async def publish_task(context: StageContext, held: Held, task: StepTask, *, subject: str = "") -> None:
    """Publish a work item with back-off, until the deadline of the request.

    Args:
        subject: where it must go; "" = the pool of the routing table.
    Raises:
        DeadlineExceededError, CancelledWorkError: nothing was published.
        ContractError: above the size cap.
    """
    step = task.step
    with stage_span("send", step.stage, held.task.trace):
        traced = msgspec.structs.replace(task, trace=carrier() or task.trace)

        async def send() -> None:
            target, lane = subject, task.lane
            if not target:
                pool = choose_pool(context, step, task.plan.later_tags)
                lane = choose_lane(context, step, pool)
                target = subjects.work(step.stage, pool.pool, task.priority_class, lane)
            payload = codec.encode(msgspec.structs.replace(traced, lane=lane))
            ttl_s = max(1.0, task.deadline_unix_s - context.clock.unix_s()) + MESSAGE_GRACE_S
            message_id = subjects.message_id(task.request_id, task.step_id, task.epoch)
            await context.bus.publish_work(target, payload, message_id=message_id, ttl_s=ttl_s)

        await context.outage.persist(send, until_unix_s=task.deadline_unix_s, is_over=lambda: held.is_abandoned)
