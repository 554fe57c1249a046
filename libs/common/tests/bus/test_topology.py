from __future__ import annotations

import pytest

from fleet_common.bus import topology
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, permissions, render
from fleet_common.bus.topology import Account, TopologyLimits
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec

SPEC = FleetSpec(
    pools=(
        PoolSpec(stage=Stage.DECODE, pool="decode-cpu", model="m", workers=(WorkerId("d0"), WorkerId("d1"))),
        PoolSpec(stage=Stage.VISION_ENCODE, pool="vision-cpu", model="m"),
    )
)


def test_every_stage_has_a_work_queue_that_refuses_when_full() -> None:
    streams = {stream.name: stream for stream in topology.streams(TopologyLimits())}

    for stage in Stage:
        config = streams[subjects.work_stream(stage)].config
        assert (config["retention"], config["discard"], config["storage"]) == ("workqueue", "new", "file")
        assert config["subjects"] == [f"fleet.work.{stage.value}.>"]
        assert config["allow_msg_ttl"]


def test_pool_has_a_consumer_per_class_and_lane() -> None:
    names = [consumer.name for consumer in topology.consumers(SPEC, Stage.DECODE, TopologyLimits())]

    assert names == [
        f"decode-cpu__{priority_class}__{lane}"
        for priority_class in ("realtime", "batch", "background")
        for lane in ("any", "w-d0", "w-d1")
    ]
    assert topology.consumers(SPEC, Stage.PREPROCESS, TopologyLimits()) == ()


def test_consumer_counts_deliveries_and_waits_as_the_design_says() -> None:
    config = topology.consumer(Stage.DECODE, "p", PriorityClass.BATCH, "any", TopologyLimits()).config

    assert config["filter_subject"] == "fleet.work.decode.p.batch.any"
    assert (config["ack_wait"], config["max_deliver"], config["max_ack_pending"]) == (6_000_000_000, 5, 10_000)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode-cpu__realtime__any", ("decode-cpu", PriorityClass.REALTIME, "any")),
        ("a__b__batch__w-x__y", ("a__b", PriorityClass.BATCH, "w-x__y")),
        ("mover", None),
        ("__batch__any", None),
    ],
)
def test_consumer_names_parse_back(name: str, expected: tuple[str, PriorityClass, str] | None) -> None:
    assert topology.parse_consumer(name) == expected


@pytest.mark.parametrize(
    ("subject", "account"),
    [
        ("fleet.work.decode.p.batch.any", Account.WORK),
        ("fleet.event.i.r.n", Account.WORK),
        ("fleet.cancel", Account.WORK),
        ("fleet.tensor.b.s", Account.WORK),
        ("fleet.kv.fleet_joins.>", Account.WORK),
        ("fleet.telemetry.>", Account.CONTROL),
        ("fleet.telemetry.decode.d0", Account.CONTROL),
        ("fleet.kv.fleet_routing.>", Account.CONTROL),
    ],
)
def test_subjects_belong_to_accounts(subject: str, account: Account) -> None:
    assert topology.account_of(subject) == account


def test_buckets_are_in_the_accounts_of_the_design() -> None:
    accounts = {spec.name: spec.account for spec in topology.BUCKETS}

    assert accounts == {
        subjects.BUCKET_JOINS: Account.WORK,
        subjects.BUCKET_TOMBSTONES: Account.WORK,
        subjects.BUCKET_REGISTRY: Account.CONTROL,
        subjects.BUCKET_ROUTING: Account.CONTROL,
        subjects.BUCKET_LEADER: Account.CONTROL,
        subjects.BUCKET_MODELS: Account.CONTROL,
        subjects.BUCKET_JOBS: Account.WORK,
        subjects.BUCKET_LINES: Account.WORK,
    }
    assert {spec.name: spec.account for spec in topology.OBJECT_BUCKETS} == {
        subjects.OBJECTS_FILES: Account.WORK,
        subjects.OBJECTS_PICTURES: Account.WORK,
    }


def test_differences_name_the_field_and_forgive_what_the_broker_leaves_out() -> None:
    wanted = {"a": 1, "b": 0, "c": "x"}

    assert topology.differences(wanted, {"a": 1, "c": "x", "more": 2}) == []
    assert topology.differences(wanted, {"a": 2, "c": "x"}) == ["a: 2 instead of 1"]


def test_only_admin_may_make_or_delete_streams_and_consumers() -> None:
    verbs = ("CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "DURABLE")

    for account in Account:
        for role in set(Role) - {Role.ADMIN}:
            allowed = permissions(account, role).publish
            risky = [s for s in allowed if s.startswith("$JS.API.") and any(f".{verb}" in s for verb in verbs)]
            # The ingress may empty what is its own: contents of files, and outcomes of jobs that are over.
            own = {
                f"$JS.API.STREAM.PURGE.{name}" for name in ("OBJ_fleet_files", "OBJ_fleet_pictures", "KV_fleet_lines")
            }
            assert (
                risky == []
                or (role is Role.PLACEMENT and all("STREAM.MSG.DELETE" in s for s in risky))
                or (role is Role.INGRESS and account is Account.WORK and set(risky) == own)
            )
            assert not {">", "$JS.>", "$JS.API.>", "$KV.>", "fleet.>"} & set(allowed)


def test_only_placement_writes_the_routing_table() -> None:
    writers = [r for r in Role if "$KV.fleet_routing.>" in permissions(Account.CONTROL, r).publish]

    assert writers == [Role.PLACEMENT]


def test_rendered_text_names_every_user_and_no_other_listener(tmp_path: object) -> None:
    passwords = Passwords({role: f"w-{role}" for role in Role}, {role: f"c-{role}" for role in Role})

    text = render(ServerOptions(4222, tmp_path), passwords)  # type: ignore[arg-type]

    assert 'listen: "127.0.0.1:4222"' in text
    assert "http:" not in text
    for role in Role:
        assert f'user: "{role}", password: "w-{role}"' in text
        assert f'user: "{role}_control", password: "c-{role}"' in text
