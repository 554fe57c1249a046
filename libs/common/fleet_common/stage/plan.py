"""How a plan unfolds: which tensors a step reads, what follows it, what repairs it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from fleet_contracts.base import ANY_LANE, Stage, StepId
from fleet_contracts.embed import EmbedParams
from fleet_contracts.tensors import TensorRef
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams
from fleet_contracts.work import MOVE_STRIDE, REPAIR_STRIDE, Plan, PlanStep, StepOutput, StepTask

PROMPT = "prompt"
LENGTHS = "lengths"


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor a step reads: output `name` of step `step_id`."""

    step_id: StepId
    name: str
    ref: TensorRef


def reads(step: PlanStep, producer: PlanStep, name: str) -> bool:
    """Whether `step` reads output `name` of `producer`.

    Encoders read the pixels or sounds of their own items, decode reads the prompt (for vectors also where its inputs
    end) and every embedding; any other pair reads all.
    """
    if producer.step_id not in step.needs:
        return False
    if producer.stage is Stage.PREPROCESS and step.stage is Stage.DECODE:
        return name == PROMPT or (name == LENGTHS and isinstance(step.params, EmbedParams))
    if producer.stage is Stage.PREPROCESS and isinstance(step.params, VisionParams | VideoEncodeParams):
        return name in {f"pixels{item}" for item in step.params.items}
    if producer.stage is Stage.PREPROCESS and isinstance(step.params, AudioEncodeParams):
        return name in {f"audio{item}" for item in step.params.items}
    return True


def wanted_tensors(task: StepTask) -> tuple[WantedTensor, ...]:
    """What the task's step reads of its inputs, in plan order."""
    step = task.step
    found: list[WantedTensor] = []
    for producer in task.plan.steps:
        output = task.inputs.get(producer.step_id)
        if output is None:
            continue
        for name, ref in output.tensors.items():
            if reads(step, producer, name):
                found.append(WantedTensor(step_id=producer.step_id, name=name, ref=ref))
    return tuple(found)


def affinity_of(task: StepTask, wanted: tuple[WantedTensor, ...]) -> tuple[object, ...]:
    """Steps of equal affinity may share a batch: same model, same shapes and types of the arrays they read.

    Steps that embed share one whatever their lengths: their engine sorts all inputs of a batch anyway.
    """
    if isinstance(task.step.params, EmbedParams):
        return (task.step.model, EmbedParams)
    return (task.step.model, *((want.ref.dtype, want.ref.shape) for want in wanted))


def descendants(plan: Plan, step_id: StepId) -> frozenset[StepId]:
    """Every step that runs after `step_id`, directly or not."""
    found: set[StepId] = set()
    for step in plan.steps:
        if step_id in step.needs or found.intersection(step.needs):
            found.add(step.step_id)
    return frozenset(found)


def readers(plan: Plan, producer: PlanStep, name: str) -> tuple[PlanStep, ...]:
    """The steps that read a tensor."""
    return tuple(step for step in plan.steps if reads(step, producer, name))


def _carried(plan: Plan, step: PlanStep) -> frozenset[StepId]:
    """Outputs a task of `step` has to carry: its own needs and those of everything after it."""
    after = descendants(plan, step.step_id)
    needs = set(step.needs)
    for other in plan.steps:
        if other.step_id in after:
            needs.update(other.needs)
    return frozenset(needs)


@dataclass(frozen=True, slots=True)
class Follow:
    """A step that follows a finished one.

    Attributes:
        inputs: what this branch knows of the step's inputs.
        is_join: some inputs come from other branches: merge into the join record first.
    """

    step: PlanStep
    inputs: Mapping[str, StepOutput]
    is_join: bool


def follows(task: StepTask, output: StepOutput) -> Iterator[Follow]:
    """What to do once the task's step has produced `output`.

    A successor that also needs a step after this one is left to that step, which carries our output along.
    """
    known = {**task.inputs, task.step_id: output}
    after = descendants(task.plan, task.step_id)
    for step in task.plan.successors(task.step_id):
        missing = [need for need in step.needs if need not in known]
        if after.intersection(missing):
            continue
        carried = _carried(task.plan, step)
        inputs = {step_id: value for step_id, value in known.items() if step_id in carried}
        yield Follow(step=step, inputs=inputs, is_join=bool(missing))


def merge_inputs(ours: Mapping[str, StepOutput], theirs: Mapping[str, StepOutput]) -> dict[str, StepOutput]:
    """Union of two sets of outputs; per step the higher epoch wins, `theirs` on a tie."""
    merged = dict(theirs)
    for step_id, output in ours.items():
        other = merged.get(step_id)
        if other is None or output.epoch > other.epoch:
            merged[step_id] = output
    return merged


def is_complete(step: PlanStep, inputs: Mapping[str, StepOutput]) -> bool:
    """Whether every input the step needs is there."""
    return all(need in inputs for need in step.needs)


def is_of_one_lineage(plan: Plan, step: PlanStep, inputs: Mapping[str, StepOutput]) -> bool:
    """Whether no input was derived from an older output than the one beside it.

    When an ancestor has run again, everything after it runs again too, at an epoch no lower: until then its old output
    would only start the step a second time.
    """
    for need in step.needs:
        before = plan.step(need).needs
        if inputs[need].epoch < sum(inputs[other].epoch for other in before if other in inputs):
            return False
    return True


def task_of(task: StepTask, step: PlanStep, inputs: Mapping[str, StepOutput], now_unix_s: float) -> StepTask:
    """Work item of a step whose inputs are complete; its epoch is the sum of those of its needs, so it never falls."""
    return msgspec.structs.replace(
        task,
        step_id=step.step_id,
        epoch=sum(inputs[need].epoch for need in step.needs),
        inputs=dict(inputs),
        enqueued_unix_s=now_unix_s,
        lane=ANY_LANE,
        solo=False,
    )


def repair_task(task: StepTask, producer_id: StepId, now_unix_s: float) -> StepTask | None:
    """Work item that derives the output of `producer_id` again; None when its own inputs are not known here."""
    producer = task.plan.step(producer_id)
    carried = _carried(task.plan, producer)
    after = descendants(task.plan, producer_id) | {producer_id}
    inputs = {key: value for key, value in task.inputs.items() if key in carried and key not in after}
    if not is_complete(producer, inputs):
        return None
    lost = task.inputs.get(producer_id)
    epoch = max(task.epoch, lost.epoch if lost is not None else 0) + REPAIR_STRIDE
    again = task_of(task, producer, inputs, now_unix_s)
    return msgspec.structs.replace(again, epoch=epoch)


def lost_producers(task: StepTask, missing: frozenset[StepId]) -> tuple[StepId, ...]:
    """Of the steps whose tensors are gone, those that no other of them will bring back by running again."""
    brought = {after for step_id in missing for after in descendants(task.plan, step_id)}
    return tuple(step.step_id for step in task.plan.steps if step.step_id in missing and step.step_id not in brought)


def moved_copy(task: StepTask) -> StepTask:
    """The task for any worker of its pool, as a new message: its deliveries so far were no deaths.

    It keeps its publish time: its age is its turn.
    """
    return msgspec.structs.replace(task, epoch=task.epoch + MOVE_STRIDE, lane=ANY_LANE)


def solo_copy(task: StepTask, now_unix_s: float) -> StepTask:
    """The task to be run alone, after it was redelivered because workers died with it in company.

    It keeps its publish time (`now_unix_s` only where the task has none): its age is its turn.
    """
    enqueued_unix_s = task.enqueued_unix_s or now_unix_s
    return msgspec.structs.replace(task, solo=True, epoch=task.epoch + MOVE_STRIDE, enqueued_unix_s=enqueued_unix_s)
