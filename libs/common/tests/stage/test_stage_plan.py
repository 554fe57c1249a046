"""The unfolding of plans, without any I/O."""

from __future__ import annotations

import msgspec

from fleet_common.errors import (
    AdmissionRejectedError,
    BusError,
    DeadlineExceededError,
    InvalidInputError,
    StoreFullError,
)
from fleet_common.failures import failure_of
from fleet_common.stage.held import Arrival, judge
from fleet_common.stage.plan import (
    descendants,
    follows,
    is_of_one_lineage,
    lost_producers,
    merge_inputs,
    repair_task,
    task_of,
    wanted_tensors,
)
from fleet_common.testing.plans import chat_plan, chat_task
from fleet_contracts.base import StepId
from fleet_contracts.tensors import InlinePlace, TensorRef
from fleet_contracts.work import StepOutput, StepTask

REF = TensorRef(place=InlinePlace(data=b""), dtype="uint8", shape=(1,), nbytes=1)


def output(step_id: str, epoch: int = 0, *names: str) -> StepOutput:
    return StepOutput(step_id=StepId(step_id), epoch=epoch, tensors=dict.fromkeys(names, REF))


def encode_task(item: int, num_images: int = 2, epoch: int = 0) -> StepTask:
    task = chat_task(now_unix_s=0.0, num_images=num_images)
    pre = output("pre", epoch, "prompt", "pixels0", "pixels1")
    return task_of(task, task.plan.step(StepId(f"enc{item}")), {"pre": pre}, 5.0)


def test_preprocess_is_followed_by_its_encoders_and_leaves_decode_to_them() -> None:
    task = chat_task(now_unix_s=0.0, num_images=2)

    after = list(follows(task, output("pre")))

    assert [(follow.step.step_id, follow.is_join) for follow in after] == [("enc0", False), ("enc1", False)]


def test_single_picture_needs_no_join() -> None:
    after = list(follows(encode_task(0, num_images=1), output("enc0")))

    assert [("dec", False, {"pre", "enc0"})] == [(f.step.step_id, f.is_join, set(f.inputs)) for f in after]


def test_two_pictures_meet_in_a_join() -> None:
    after = list(follows(encode_task(0), output("enc0")))

    assert [("dec", True, {"pre", "enc0"})] == [(f.step.step_id, f.is_join, set(f.inputs)) for f in after]


def test_epoch_of_a_step_is_the_sum_of_its_inputs() -> None:
    task = chat_task(now_unix_s=0.0, num_images=2)
    inputs = {"pre": output("pre", 1), "enc0": output("enc0", 1), "enc1": output("enc1", 3)}

    dec = task_of(task, task.plan.step(StepId("dec")), inputs, 7.0)

    assert (dec.epoch, dec.enqueued_unix_s) == (5, 7.0)


def test_repair_outranks_both_the_lost_output_and_the_step_that_missed_it() -> None:
    task = chat_task(now_unix_s=0.0, num_images=1)
    inputs = {"pre": output("pre", 1), "enc0": output("enc0", 2)}
    dec = task_of(task, task.plan.step(StepId("dec")), inputs, 0.0)

    again = repair_task(dec, StepId("enc0"), 9.0)

    assert again is not None
    assert ("enc0", 4, {"pre"}, 9.0) == (again.step_id, again.epoch, set(again.inputs), again.enqueued_unix_s)


def test_repair_without_the_inputs_of_the_producer_is_impossible() -> None:
    task = encode_task(0, num_images=1)
    dec = msgspec.structs.replace(task, step_id="dec", inputs={"enc0": output("enc0")})

    assert repair_task(dec, StepId("enc0"), 0.0) is None


def test_lost_ancestor_brings_its_descendants_back() -> None:
    task = chat_task(now_unix_s=0.0, num_images=2)

    assert lost_producers(task, frozenset({StepId("pre"), StepId("enc0")})) == ("pre",)
    assert lost_producers(task, frozenset({StepId("enc1"), StepId("enc0")})) == ("enc0", "enc1")


def test_join_waits_for_branches_of_the_newest_ancestor() -> None:
    plan = chat_plan(2)
    dec = plan.step(StepId("dec"))
    inputs = {"pre": output("pre", 2), "enc0": output("enc0", 2), "enc1": output("enc1", 0)}

    assert not is_of_one_lineage(plan, dec, inputs)
    assert is_of_one_lineage(plan, dec, {**inputs, "enc1": output("enc1", 2)})
    assert is_of_one_lineage(plan, dec, {**inputs, "enc1": output("enc1", 5)})


def test_encoder_reads_only_its_own_pixels() -> None:
    assert [want.name for want in wanted_tensors(encode_task(1))] == ["pixels1"]


def test_merge_keeps_the_higher_epoch() -> None:
    merged = merge_inputs({"a": output("a", 2), "b": output("b", 0)}, {"a": output("a", 1), "b": output("b", 3)})

    assert {key: value.epoch for key, value in merged.items()} == {"a": 2, "b": 3}


def test_descendants_follow_every_branch() -> None:
    plan = chat_plan(2)

    assert {"enc0", "enc1", "dec"} == descendants(plan, StepId("pre"))
    assert {"dec"} == descendants(plan, StepId("enc0"))


def test_failures_name_a_status_and_leak_nothing() -> None:
    invalid = failure_of(InvalidInputError("too large", param="messages[0]"), "r1")
    outage = failure_of(BusError("nats://secret:4222 refused"), "r1")

    assert (
        invalid.status,
        invalid.error_type,
        invalid.message,
        invalid.param,
    ) == (400, "invalid_request_error", "too large", "messages[0]")
    assert "secret" not in outage.message
    assert "r1" in outage.message
    statuses = [
        failure_of(error, "r").status
        for error in (
            AdmissionRejectedError("x"),
            DeadlineExceededError("x"),
            StoreFullError("x"),
            ValueError("/etc/passwd"),
        )
    ]
    assert statuses == [429, 504, 503, 500]


def test_first_delivery_is_new() -> None:
    assert Arrival.NEW is judge(None, epoch=0, delivery=1)
