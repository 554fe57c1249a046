"""Tasks and routing tables for tests."""

from __future__ import annotations

import itertools

from fleet_contracts.base import IngressId, PriorityClass, RequestId, Stage, StepId, WorkerId
from fleet_contracts.control import PoolRoute, Route, RoutingTable, WorkerShare
from fleet_contracts.decode import DecodeParams
from fleet_contracts.preprocess import PreprocessParams
from fleet_contracts.tensors import TensorRef
from fleet_contracts.vision import VisionParams
from fleet_contracts.work import EventAddress, Plan, PlanStep, StepTask

MODEL = "m"
PRE, DEC = StepId("pre"), StepId("dec")
POOLS = {
    Stage.PREPROCESS: "pre-p",
    Stage.VISION_ENCODE: "vis-p",
    Stage.DECODE: "dec-p",
    Stage.AUDIO_TRANSCRIBE: "asr-p",
    Stage.AUDIO_SPEAK: "tts-p",
}

_numbers = itertools.count()


def chat_plan(num_images: int, model: str = MODEL) -> Plan:
    """`pre`, one `enc<i>` per image, `dec`."""
    pre = PlanStep(step_id=PRE, stage=Stage.PREPROCESS, model=model, params=PreprocessParams())
    encoders = tuple(
        PlanStep(
            step_id=StepId(f"enc{n}"),
            stage=Stage.VISION_ENCODE,
            model=model,
            params=VisionParams(items=(n,)),
            needs=(PRE,),
        )
        for n in range(num_images)
    )
    needs = (PRE, *(step.step_id for step in encoders))
    dec = PlanStep(step_id=DEC, stage=Stage.DECODE, model=model, params=DecodeParams(), needs=needs)
    return Plan(steps=(pre, *encoders, dec))


def chat_task(
    *,
    now_unix_s: float,
    num_images: int = 0,
    request_id: str = "",
    timeout_s: float = 60.0,
    priority_class: PriorityClass = PriorityClass.REALTIME,
    root: TensorRef | None = None,
    ingress_id: str = "ing0",
    plan: Plan | None = None,
) -> StepTask:
    """The first task of a chat request."""
    plan = plan or chat_plan(num_images)
    return StepTask(
        request_id=RequestId(request_id or f"{ingress_id}_{next(_numbers):032x}"),
        step_id=plan.steps[0].step_id,
        epoch=0,
        plan=plan,
        model=MODEL,
        priority_class=priority_class,
        tenant="t",
        deadline_unix_s=now_unix_s + timeout_s,
        enqueued_unix_s=now_unix_s,
        events=EventAddress(ingress_id=IngressId(ingress_id), nonce="nonce0"),
        root=root,
    )


def one_pool_table(*, locality: str = "memory", workers: tuple[WorkerId, ...] = (), revision: int = 1) -> RoutingTable:
    """One pool per stage of `POOLS`."""
    shares = tuple(WorkerShare(worker_id=worker, share_ratio=1 / len(workers)) for worker in workers)
    routes = tuple(
        Route(
            stage=stage,
            model=MODEL,
            pools=(PoolRoute(pool=pool, weight_ratio=1.0, locality=locality, workers=shares),),
        )
        for stage, pool in POOLS.items()
    )
    return RoutingTable(revision=revision, made_unix_s=0.0, policy="test", routes=routes)
