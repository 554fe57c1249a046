"""Open what a step reads; derive again what is gone."""

from __future__ import annotations

import structlog

from fleet_common.errors import FleetError, TensorNotFoundError
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import root_lost
from fleet_common.stage.held import Held
from fleet_common.stage.plan import WantedTensor, lost_producers, repair_task
from fleet_common.stage.publish import publish_task
from fleet_contracts.base import StepId

log = structlog.get_logger(__name__)


class InputsLostError(FleetError):
    """Inputs are gone. `steps` produced them; empty when it is the root."""

    def __init__(self, steps: frozenset[StepId]) -> None:
        super().__init__("inputs are gone")
        self.steps = steps


async def open_inputs(context: StageContext, held: Held, *, needs_root: bool) -> None:
    """Open a view of every tensor the step reads, waiting while the store is out of reach.

    Raises:
        InputsLostError: some are gone; nothing stays open.
        DeadlineExceededError, CancelledWorkError: while waiting.
    """
    missing: set[StepId] = set()

    async def open_one(want: WantedTensor) -> None:
        try:
            lease = await context.store.get(want.ref)
        except TensorNotFoundError as error:
            log.info("tensor_missed", step_id=want.step_id, tensor=want.name, reason=str(error))
            missing.add(want.step_id)
            return
        held.leases.append(lease)
        held.tensors[(want.step_id, want.name)] = lease.array
        held.bytes_in += want.ref.nbytes

    for want in held.wanted:
        await context.outage.persist(
            lambda want=want: open_one(want),  # type: ignore[misc]
            until_unix_s=held.task.deadline_unix_s,
            is_over=lambda: held.is_abandoned,
        )
    if needs_root and not missing:
        await context.outage.persist(
            lambda: _open_root(context, held),
            until_unix_s=held.task.deadline_unix_s,
            is_over=lambda: held.is_abandoned,
        )
    if missing:
        held.close_inputs()
        raise InputsLostError(frozenset(missing))


async def _open_root(context: StageContext, held: Held) -> None:
    root = held.task.root
    if root is None:
        raise InputsLostError(frozenset())
    try:
        lease = await context.store.get(root)
    except TensorNotFoundError as error:
        held.close_inputs()
        raise InputsLostError(frozenset()) from error
    with lease:
        held.root = lease.array.tobytes()
    held.bytes_in += root.nbytes


async def repair(context: StageContext, held: Held, steps: frozenset[StepId]) -> None:
    """Publish the steps that produced what is gone, at a higher epoch; without them ask the ingress for the root.

    Two attempts that miss the same tensor publish the same message id, so the step runs again once.
    """
    now_unix_s = context.clock.unix_s()
    tasks = [repair_task(held.task, step_id, now_unix_s) for step_id in lost_producers(held.task, steps)]
    repairs = [task for task in tasks if task is not None]
    if not repairs or len(repairs) < len(tasks):
        status = await root_lost(context, held)
        log.warning("root_lost", request_id=held.task.request_id, step_id=held.task.step_id, answer=status)
        return
    for task in repairs:
        await publish_task(context, held, task)
        context.metrics.repairs_total.labels(stage=context.identity.stage.value).inc()
        log.info("step_repaired", request_id=task.request_id, step_id=task.step_id, epoch=task.epoch)
