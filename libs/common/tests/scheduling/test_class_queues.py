"""Fairness between priority classes, as properties."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_common.scheduling.classes import ClassPolicy, ClassQueues, Entry
from fleet_contracts.base import PriorityClass

WEIGHTS = {"realtime": 0.6, "batch": 0.3, "background": 0.1}
POLICY = ClassPolicy(weights=WEIGHTS, aging_s=30.0)
NOW_S = 1_000.0

classes = st.sampled_from(list(PriorityClass))


def entry(key: str, priority_class: PriorityClass, enqueued_unix_s: float = NOW_S) -> Entry[str]:
    return Entry(
        key=key, priority_class=priority_class, enqueued_unix_s=enqueued_unix_s, arrived_s=enqueued_unix_s, item=key
    )


def drain(queues: ClassQueues[str], now_unix_s: float = NOW_S) -> list[Entry[str]]:
    order = []
    while (found := queues.pop(now_unix_s)) is not None:
        order.append(found)
    return order


@given(st.lists(classes, max_size=60))
def test_every_entry_is_served_exactly_once(arrivals: list[PriorityClass]) -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    for number, priority_class in enumerate(arrivals):
        queues.push(entry(str(number), priority_class, NOW_S - 20 + number / 10))

    order = drain(queues)

    assert sorted(range(len(arrivals))) == sorted(int(found.key) for found in order)
    assert len(queues) == 0


@given(st.lists(classes, max_size=60), st.lists(st.booleans(), max_size=120))
def test_queues_are_work_conserving(arrivals: list[PriorityClass], steps: list[bool]) -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    waiting = list(arrivals)
    for is_push in steps:
        if is_push and waiting:
            queues.push(entry(str(len(waiting)), waiting.pop()))
        else:
            had_work = len(queues) > 0
            assert had_work == (queues.pop(NOW_S) is not None)


@given(
    flooding=st.lists(classes, min_size=1, max_size=2, unique=True),
    victim=classes,
    ahead=st.integers(min_value=0, max_value=10),
    served_before=st.integers(min_value=0, max_value=50),
)
@settings(max_examples=200, deadline=None)
def test_wait_is_bounded_under_a_flood(
    flooding: list[PriorityClass], victim: PriorityClass, ahead: int, served_before: int
) -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    for number in range(400):
        for priority_class in flooding:
            if priority_class is not victim:
                queues.push(entry(f"flood-{priority_class}-{number}", priority_class))
    for _ in range(served_before):
        queues.pop(NOW_S)
    for number in range(ahead + 1):
        queues.push(entry(f"victim-{number}", victim))

    position = 1
    while (found := queues.pop(NOW_S)) is not None and found.key != f"victim-{ahead}":
        position += 1

    bound = math.ceil((ahead + 1) / POLICY.share_ratio(victim)) + len(PriorityClass)
    assert position <= bound


def test_shares_follow_the_weights_while_all_classes_have_work() -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    for number in range(1000):
        for priority_class in PriorityClass:
            queues.push(entry(f"{priority_class}-{number}", priority_class))

    served = [queues.pop(NOW_S) for _ in range(1000)]

    for priority_class, expected in ((c, WEIGHTS[c.value]) for c in PriorityClass):
        count = sum(found is not None and found.priority_class is priority_class for found in served)
        assert abs(count / 1000 - expected) <= 0.005


def test_idling_earns_no_credit() -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    for number in range(200):
        queues.push(entry(f"r{number}", PriorityClass.REALTIME))
    for _ in range(100):
        queues.pop(NOW_S)
    for number in range(50):
        queues.push(entry(f"b{number}", PriorityClass.BACKGROUND))

    served = [queues.pop(NOW_S) for _ in range(35)]

    count = sum(found is not None and found.priority_class is PriorityClass.BACKGROUND for found in served)
    assert 4 <= count <= 6


def test_aged_entry_goes_before_every_younger_one() -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    queues.push(entry("young", PriorityClass.REALTIME, NOW_S - 1))
    queues.push(entry("aged", PriorityClass.BACKGROUND, NOW_S - 31))
    queues.push(entry("older", PriorityClass.BATCH, NOW_S - 40))

    assert [found.key for found in drain(queues)] == ["older", "aged", "young"]


def test_class_without_weight_keeps_the_minimum() -> None:
    policy = ClassPolicy(weights={"realtime": 1.0, "batch": 0.0, "background": 0.0})

    assert policy.share_ratio(PriorityClass.BACKGROUND) >= 0.04


def test_removed_entry_is_not_served() -> None:
    queues: ClassQueues[str] = ClassQueues(POLICY)
    queues.push(entry("a", PriorityClass.BATCH))

    assert queues.remove("a") is not None
    assert queues.remove("a") is None
    assert queues.pop(NOW_S) is None
