"""Steps as the runner hands them to engines, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fleet_common.stage.port import StepItem
from fleet_common.tensors.port import Array
from fleet_contracts.base import IngressId, PriorityClass, RequestId, WorkerId
from fleet_contracts.events import Attempt
from fleet_contracts.work import EventAddress, Plan, PlanStep, StepTask


def first_attempt(
    step: PlanStep,
    *others: PlanStep,
    request_id: str = "i_1",
    worker_id: str = "w",
    tensors: Mapping[tuple[str, str], Array] = MappingProxyType({}),
    root: bytes = b"",
    **task: Any,
) -> StepItem:
    """The first delivery of `step`, whose plan holds `others` too; `task` sets fields of its work item."""
    fields: dict[str, Any] = {
        "priority_class": PriorityClass.REALTIME,
        "tenant": "t",
        "deadline_unix_s": 1e12,
        "enqueued_unix_s": 0.0,
        **task,
    }
    work = StepTask(
        request_id=RequestId(request_id),
        step_id=step.step_id,
        epoch=0,
        plan=Plan(steps=(step, *others)),
        model=step.model,
        events=EventAddress(ingress_id=IngressId("i"), nonce="n"),
        **fields,
    )
    attempt = Attempt(
        request_id=work.request_id,
        step_id=work.step_id,
        stage=step.stage,
        worker_id=WorkerId(worker_id),
        epoch=0,
        delivery=1,
    )
    return StepItem(task=work, attempt=attempt, tensors=tensors, root=root)
