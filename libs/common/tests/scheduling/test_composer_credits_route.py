"""Batches, credits and the choice of a pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_common.scheduling.batch_size import linger_s
from fleet_common.scheduling.classes import ClassPolicy, ClassQueues, Entry
from fleet_common.scheduling.composer import BatchLimits, compose
from fleet_common.scheduling.credits import CreditPolicy, total, wanted
from fleet_common.scheduling.route import pick_lane, pick_pool, share_of
from fleet_contracts.base import PriorityClass, Stage, WorkerId
from fleet_contracts.control import PoolRoute, Route, RoutingTable, WorkerShare

SHARES = {PriorityClass.REALTIME: 0.6, PriorityClass.BATCH: 0.3, PriorityClass.BACKGROUND: 0.1}
NOW_S = 100.0


def queues_of(*entries: Entry[str]) -> ClassQueues[str]:
    queues: ClassQueues[str] = ClassQueues(ClassPolicy(weights={c.value: s for c, s in SHARES.items()}))
    for one in entries:
        queues.push(one)
    return queues


def entry(
    key: str, *, shape: int = 1, cost_bytes: int = 10, is_solo: bool = False, arrived_s: float = NOW_S, rank: float = 0
) -> Entry[str]:
    return Entry(
        key=key,
        priority_class=PriorityClass.REALTIME,
        enqueued_unix_s=NOW_S + rank,
        arrived_s=arrived_s,
        item=key,
        affinity=(shape,),
        cost_bytes=cost_bytes,
        is_solo=is_solo,
    )


def keys(queues: ClassQueues[str], limits: BatchLimits) -> list[str]:
    return [one.key for one in compose(queues, limits, now_s=NOW_S, now_unix_s=NOW_S).batch]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(0, 120),
)
def test_batch_obeys_every_limit(arrivals: list[tuple[int, int, bool]], max_batch: int, max_bytes: int) -> None:
    queues = queues_of(
        *(
            entry(str(n), shape=shape, cost_bytes=size, is_solo=solo, rank=n / 100)
            for n, (shape, size, solo) in enumerate(arrivals)
        )
    )
    limits = BatchLimits(max_batch=max_batch, max_bytes=max_bytes)

    served: list[str] = []
    while batch := compose(queues, limits, now_s=NOW_S, now_unix_s=NOW_S).batch:
        served += [one.key for one in batch]
        assert len(batch) <= max_batch
        assert len({one.affinity for one in batch}) == 1
        assert len(batch) == 1 or not any(one.is_solo for one in batch)
        assert len(batch) == 1 or not max_bytes or sum(one.cost_bytes for one in batch) <= max_bytes

    assert sorted(served) == sorted(str(n) for n in range(len(arrivals)))


def test_only_equal_shapes_share_a_batch() -> None:
    queues = queues_of(entry("a", shape=1), entry("b", shape=2, rank=0.1), entry("c", shape=1, rank=0.2))

    assert keys(queues, BatchLimits(max_batch=4)) == ["a", "c"]
    assert keys(queues, BatchLimits(max_batch=4)) == ["b"]


def test_solo_entry_runs_alone() -> None:
    queues = queues_of(entry("a", is_solo=True), entry("b", rank=0.1))

    assert keys(queues, BatchLimits(max_batch=4)) == ["a"]


def test_entry_waits_for_company_at_most_as_long_as_told() -> None:
    limits = BatchLimits(max_batch=4, linger_s=0.05)
    queues = queues_of(entry("a", arrived_s=NOW_S - 0.02))

    early = compose(queues, limits, now_s=NOW_S, now_unix_s=NOW_S)
    late = compose(queues, limits, now_s=NOW_S + 0.04, now_unix_s=NOW_S)

    assert early.wait_s is not None
    assert abs(early.wait_s - 0.03) < 1e-6
    assert [one.key for one in late.batch] == ["a"]


def test_full_batch_does_not_wait() -> None:
    queues = queues_of(entry("a"), entry("b", rank=0.1))

    assert keys(queues, BatchLimits(max_batch=2, linger_s=10.0)) == ["a", "b"]


def test_lone_request_on_an_idle_worker_never_lingers() -> None:
    assert linger_s(0.05, service_s=1.0, last_batch_size=1) == 0.0
    assert linger_s(0.05, service_s=1.0, last_batch_size=3) == 0.05
    assert linger_s(0.05, service_s=0.002, last_batch_size=3) == 0.001


@given(
    slots=st.integers(1, 64),
    share_ratio=st.floats(0, 1),
    num_workers=st.integers(1, 10),
    held=st.fixed_dictionaries({c: st.integers(0, 400) for c in PriorityClass}),
)
def test_no_class_starves_and_what_is_held_is_bounded(
    slots: int, share_ratio: float, num_workers: int, held: dict[PriorityClass, int]
) -> None:
    policy = CreditPolicy(slots=slots, look_ahead_ratio=4.0, shares=SHARES)
    limits = policy.class_limits(share_ratio, num_workers)

    wants = wanted(limits, held)

    for priority_class, limit in limits.items():
        want = wants[priority_class]
        if held[priority_class] < limit:
            assert want.any_lane >= 1
            assert want.own_lane >= 1
        assert held[priority_class] + want.any_lane + want.own_lane <= max(limit + 1, held[priority_class])
        assert limit >= slots
    look_ahead = policy.look_ahead(share_ratio, num_workers)
    assert sum(limits.values()) <= 3 * slots + look_ahead + 3
    assert total(wants) <= sum(limits.values()) + 3


def test_smaller_share_holds_less() -> None:
    policy = CreditPolicy(slots=8, look_ahead_ratio=4.0, shares=SHARES)

    assert policy.look_ahead(0.5, 2) == 32
    assert policy.look_ahead(0.1, 2) == 7


def route(*pools: PoolRoute) -> Route:
    return Route(stage=Stage.DECODE, model="m", pools=pools)


def pool(name: str, weight_ratio: float, *workers: WorkerShare) -> PoolRoute:
    return PoolRoute(pool=name, weight_ratio=weight_ratio, locality="l", workers=workers)


@given(st.floats(0, 1, exclude_max=True))
def test_pool_is_picked_by_weight(random_ratio: float) -> None:
    picked = pick_pool(route(pool("a", 0.25), pool("b", 0.75), pool("c", 0.0)), random_ratio)

    assert picked is not None
    assert ("a" if random_ratio < 0.25 else "b") == picked.pool


def test_route_without_weights_still_leads_somewhere() -> None:
    picked = pick_pool(route(pool("a", 0.0)), 0.5)

    assert picked is not None
    assert picked.pool == "a"
    assert pick_pool(route(), 0.5) is None


def test_share_is_whole_until_a_table_knows_the_worker() -> None:
    shares = (
        WorkerShare(worker_id=WorkerId("w0"), share_ratio=0.2),
        WorkerShare(worker_id=WorkerId("w1"), share_ratio=0.8),
    )
    table = RoutingTable(revision=1, made_unix_s=0.0, policy="p", routes=(route(pool("a", 1.0, *shares)),))

    assert share_of(None, "a", WorkerId("w0")) == (1.0, 1)
    assert share_of(table, "a", WorkerId("w0")) == (0.2, 2)
    assert share_of(table, "a", WorkerId("other")) == (1.0, 1)


def shares_of(*ratios: float) -> PoolRoute:
    shares = [WorkerShare(worker_id=WorkerId(f"w{n}"), share_ratio=ratio) for n, ratio in enumerate(ratios)]
    return pool("a", 1.0, *shares)


@pytest.mark.parametrize(
    ("holders", "ratios", "lane"),
    [
        ({"w1"}, (0.5, 0.5), "w-w1"),
        (set(), (0.5, 0.5), "any"),
        ({"w1"}, (0.8, 0.2), "any"),
        ({"w0", "w1"}, (0.8, 0.2), "w-w0"),
        ({"w1"}, (0.7, 0.3), "w-w1"),
        ({"elsewhere"}, (0.5, 0.5), "any"),
        ({"w0"}, (1.0,), "any"),
    ],
    ids=["holder", "nobody", "overloaded", "the-other-one", "busy", "foreign", "alone"],
)
def test_the_lane_of_a_worker_that_holds_an_adapter_is_preferred(
    holders: set[str], ratios: tuple[float, ...], lane: str
) -> None:
    assert pick_lane(shares_of(*ratios), {WorkerId(name) for name in holders}, 0.0) == lane


@given(st.floats(0, 1, exclude_max=True))
def test_several_holders_share_the_work(random_ratio: float) -> None:
    lane = pick_lane(shares_of(0.5, 0.5), {WorkerId("w0"), WorkerId("w1")}, random_ratio)

    assert lane == ("w-w0" if random_ratio < 0.5 else "w-w1")
