"""Hand on what a step made: tensors into the store, then the steps that follow."""

from __future__ import annotations

import math

import structlog

from fleet_common.bus.port import KvEntry
from fleet_common.errors import FleetError, RevisionConflictError, StoreFullError
from fleet_common.stage.context import StageContext
from fleet_common.stage.held import Held
from fleet_common.stage.plan import Follow, follows, is_complete, is_of_one_lineage, merge_inputs, readers, task_of
from fleet_common.stage.port import Product
from fleet_common.stage.publish import locality_of, publish_task
from fleet_common.tensors.port import Reservation
from fleet_contracts import codec
from fleet_contracts.tensors import TensorRef
from fleet_contracts.work import JoinRecord, StepOutput

log = structlog.get_logger(__name__)

_JOIN_GRACE_S = 60.0
#: Lost races in a row before the back-off starts.
_MAX_RACES = 10


async def keep_product(context: StageContext, held: Held, product: Product) -> StepOutput:
    """Put every tensor where its readers can reach it.

    Room for all of them is set aside first where there is some: a product that is half in a full arena would keep
    others out while it waits. What has no room goes to the network store, part by part.
    """
    task = held.task
    localities = {name: locality_of(context, readers(task.plan, task.step, name)) for name in product.tensors}
    own = [
        product.tensors[name].nbytes for name, locality in localities.items() if locality == context.identity.locality
    ]
    reservation = await _reserve(context, held, own) if len(own) > 1 else None
    tensors: dict[str, TensorRef] = {}
    try:
        for name, locality in localities.items():
            room = reservation if locality == context.identity.locality else None
            tensors[name] = await _put(context, held, product, name, locality, room)
            held.bytes_out += tensors[name].nbytes
    finally:
        if reservation is not None:
            await reservation.cancel()
    return StepOutput(step_id=task.step_id, epoch=task.epoch, tensors=tensors, result=product.result)


async def _reserve(context: StageContext, held: Held, part_bytes: list[int]) -> Reservation | None:
    try:
        return await context.store.reserve(sum(part_bytes), ttl_s=_ttl_s(context, held), part_bytes=part_bytes)
    except StoreFullError:
        return None


def _ttl_s(context: StageContext, held: Held) -> float:
    """One redelivery more than the deadline: the last reader may be a second attempt."""
    left_s = max(0.0, held.task.deadline_unix_s - context.clock.unix_s())
    return left_s + context.settings.ack_wait_s


async def _put(
    context: StageContext, held: Held, product: Product, name: str, locality: str | None, room: Reservation | None
) -> TensorRef:
    array = product.tensors[name]
    dtype, content_hash = product.dtypes.get(name), product.hashes.get(name, "")

    async def put() -> TensorRef:
        ttl_s = _ttl_s(context, held)
        if room is not None:
            return await room.put(array, ttl_s=ttl_s, dtype=dtype, content_hash=content_hash)
        return await context.store.put(array, ttl_s=ttl_s, locality=locality, dtype=dtype, content_hash=content_hash)

    until_unix_s = held.task.deadline_unix_s
    return await context.outage.persist(put, until_unix_s=until_unix_s, is_over=lambda: held.is_abandoned)


async def publish_next(context: StageContext, held: Held, output: StepOutput) -> None:
    """Publish every step that can run now; inputs of the others go into their join records."""
    for follow in follows(held.task, output):
        inputs = await _join(context, held, follow) if follow.is_join else follow.inputs
        if is_complete(follow.step, inputs) and is_of_one_lineage(held.task.plan, follow.step, inputs):
            task = task_of(held.task, follow.step, inputs, context.clock.unix_s())
            await publish_task(context, held, task)


async def _join(context: StageContext, held: Held, follow: Follow) -> dict[str, StepOutput]:
    """Merge this branch into the record and return the whole; a lost race is run again."""
    key = f"{held.task.request_id}.{follow.step.step_id}"

    async def merge() -> dict[str, StepOutput]:
        bucket = await context.joins.open()
        ttl_s = math.ceil(max(1.0, held.task.deadline_unix_s - context.clock.unix_s()) + _JOIN_GRACE_S)
        for _ in range(_MAX_RACES):
            entry = await bucket.get(key)
            known = _inputs_of(entry)
            merged = merge_inputs(follow.inputs, known)
            if entry is not None and merged == known:
                return merged
            value = codec.encode(JoinRecord(inputs=merged))
            try:
                if entry is None:
                    await bucket.create(key, value, ttl_s)
                else:
                    await bucket.update(key, value, entry.revision, ttl_s)
            except RevisionConflictError:
                # Another branch was faster: its record is read and merged in the next round.
                continue
            return merged
        raise RevisionConflictError(f"{key}: other branches were faster {_MAX_RACES} times")

    return await context.outage.persist(
        merge, until_unix_s=held.task.deadline_unix_s, is_over=lambda: held.is_abandoned
    )


def _inputs_of(entry: KvEntry | None) -> dict[str, StepOutput]:
    if entry is None:
        return {}
    try:
        return codec.decode_join(entry.value).inputs
    except codec.DecodeError as error:
        # Written over: what other branches had merged is lost, and the ingress resubmits when nothing moves.
        log.error("join_undecodable", reason=str(error))
        return {}


async def release_inputs(context: StageContext, held: Held) -> None:
    """Free what only this step read: its successors have their own inputs by now.

    The terminal step frees everything the request ever put. Best effort: the TTL is the net.
    """
    task = held.task
    if not task.plan.successors(task.step_id):
        await release_request(context, held)
        return
    for want in held.wanted:
        producer = task.plan.step(want.step_id)
        if readers(task.plan, producer, want.name) == (task.step,):
            await _release(context, want.ref)


async def release_request(context: StageContext, held: Held) -> None:
    """Free every tensor the task knows of: the request is over. A job's root outlives everything."""
    task = held.task
    for output in task.inputs.values():
        for ref in output.tensors.values():
            await _release(context, ref)
    if task.root is not None and not task.is_job:
        await _release(context, task.root)


async def _release(context: StageContext, ref: TensorRef) -> None:
    try:
        await context.store.release(ref)
    except FleetError as error:
        log.info("release_failed", code=error.code)
