"""The wire: golden bytes decode for ever, an independent decoder agrees, and compatible change is possible."""

from __future__ import annotations

from pathlib import Path

import msgpack
import msgspec
import pytest

from fleet_contracts import channels, codec, subjects
from fleet_contracts.base import IngressId, PriorityClass, RequestId, Stage, WorkerId
from fleet_contracts.examples import EXAMPLES
from fleet_contracts.work import Plan, PlanStep, StepTask

GOLDEN = Path(__file__).parent.parent / "golden"
BY_TAG = {str(type(example).__struct_config__.tag): example for example in EXAMPLES}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.msgpack")), ids=lambda path: path.stem)
def test_golden_bytes_decode_to_the_literal(path: Path) -> None:
    example = BY_TAG[path.stem]

    decoded = msgspec.msgpack.decode(path.read_bytes(), type=type(example))

    assert decoded == example


def test_every_example_has_golden_bytes() -> None:
    assert set(BY_TAG) == {path.stem for path in GOLDEN.glob("*.msgpack")}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_an_independent_decoder_reads_the_same_names(example: msgspec.Struct) -> None:
    plain = msgpack.unpackb(codec.encode(example))

    assert plain["type"] == type(example).__struct_config__.tag
    assert set(plain) - {"type"} <= set(type(example).__struct_fields__)


def test_a_field_of_a_later_release_is_ignored() -> None:
    plain = msgpack.unpackb((GOLDEN / "cancel.v1.msgpack").read_bytes())
    plain["added_in_n_plus_1"] = {"anything": [1, 2]}

    decoded = codec.decode_cancel(msgpack.packb(plain))

    assert decoded == BY_TAG["cancel.v1"]


@pytest.mark.parametrize("payload", [b"", b"\x80\x04.", b"\xc1", msgpack.packb({"type": "step_task.v9"}), b"\x00" * 64])
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode_task(payload)


def test_every_channel_message_has_an_example() -> None:
    spoken = {struct for channel in channels.CHANNELS for struct in (*channel.messages, *channel.replies)}
    shown = {type(example) for example in EXAMPLES}

    assert {struct.__name__ for struct in spoken - shown} <= {"Progress", "Chunk"}


def test_subjects_match_the_table_of_channels() -> None:
    built = {
        "work": subjects.work(Stage.DECODE, "p", PriorityClass.BATCH),
        "event": subjects.event(IngressId("i"), RequestId("r"), "n"),
        "cancel": subjects.CANCEL,
        "ask": subjects.ask(IngressId("i")),
        "spill": subjects.spill("boot", "owner"),
        "dead": subjects.dead(Stage.DECODE),
        "result": subjects.result("job_1"),
        "telemetry": subjects.telemetry(Stage.DECODE, WorkerId("w")),
    }

    for channel in channels.CHANNELS:
        if channel.kind != "kv":
            pattern, subject = channel.address.split("."), built[channel.name].split(".")
            assert len(pattern) == len(subject)
            assert all(p == s or p.startswith("{") for p, s in zip(pattern, subject, strict=True))


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "", "x" * 81])
def test_names_that_would_change_a_subject_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="token"):
        subjects.work(Stage.DECODE, name, PriorityClass.REALTIME)


def test_plan_finds_steps_and_their_successors() -> None:
    task = BY_TAG["step_task.v1"]
    assert isinstance(task, StepTask)

    successors = [step.step_id for step in task.plan.successors(task.plan.steps[0].step_id)]

    assert successors == ["enc0", "dec"]
    assert task.step.stage == Stage.DECODE


def test_an_unknown_step_is_a_key_error() -> None:
    plan = Plan(steps=())

    with pytest.raises(KeyError):
        plan.step(PlanStep.__struct_fields__[0])  # type: ignore[arg-type]
