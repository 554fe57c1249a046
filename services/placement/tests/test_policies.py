"""One behaviour suite for every policy, and what is particular to each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_placement.core.policies import POLICIES
from fleet_placement.core.policies.port import Policy, Taker

names = st.text("abcdefgh", min_size=1, max_size=4)
takers = st.lists(
    st.builds(
        Taker,
        name=names,
        slots=st.integers(1, 64),
        service_s=st.one_of(st.just(0.0), st.floats(1e-4, 1e3)),
        queued=st.integers(0, 10_000),
        freshness_ratio=st.floats(0.0, 1.0),
        is_live=st.booleans(),
    ),
    unique_by=lambda taker: taker.name,
    max_size=8,
)


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]


@given(group=takers)
@pytest.mark.parametrize("policy_name", sorted(POLICIES))
def test_weights_are_a_division_of_the_work_among_the_live(policy_name: str, group: list[Taker]) -> None:
    weights = POLICIES[policy_name].weights(group)

    assert set(weights) == {taker.name for taker in group}
    assert all(weight >= 0.0 for weight in weights.values())
    assert all(weights[taker.name] == 0.0 for taker in group if not taker.is_live)
    expected = 1.0 if any(taker.is_live for taker in group) else 0.0
    assert sum(weights.values()) == pytest.approx(expected)


@given(group=takers, which=st.integers(0, 7), factor=st.floats(1.0, 100.0))
@pytest.mark.parametrize("policy_name", sorted(POLICIES))
def test_a_slower_worker_never_gets_more(policy_name: str, group: list[Taker], which: int, factor: float) -> None:
    if not group:
        return
    victim = group[which % len(group)]
    slower = [replace(taker, service_s=taker.service_s * factor) if taker is victim else taker for taker in group]

    before = POLICIES[policy_name].weights(group)[victim.name]
    after = POLICIES[policy_name].weights(slower)[victim.name]

    assert after <= before + 1e-9


def test_equal_workers_get_equal_parts(policy: Policy) -> None:
    weights = policy.weights([Taker(name="a", slots=4, service_s=0.1), Taker(name="b", slots=4, service_s=0.1)])

    assert weights == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}


def test_twice_the_slots_get_twice_the_part(policy: Policy) -> None:
    weights = policy.weights([Taker(name="a", slots=8), Taker(name="b", slots=4)])

    assert weights["a"] == pytest.approx(2 / 3, abs=0.03)


def test_static_does_not_look_at_load() -> None:
    weights = POLICIES["static"].weights([Taker(name="a", slots=4, service_s=9.0, queued=50), Taker(name="b", slots=4)])

    assert weights == {"a": 0.5, "b": 0.5}


def test_least_loaded_follows_the_service_rate() -> None:
    weights = POLICIES["least_loaded"].weights(
        [Taker(name="a", slots=4, service_s=0.4), Taker(name="b", slots=4, service_s=0.1)]
    )

    assert weights["a"] == pytest.approx(0.2, abs=0.02)


def test_least_loaded_gives_less_to_who_has_a_queue() -> None:
    weights = POLICIES["least_loaded"].weights([Taker(name="a", slots=4, queued=64), Taker(name="b", slots=4)])

    assert weights["a"] < 0.4


def test_least_loaded_gives_a_measuring_part_to_the_slowest() -> None:
    weights = POLICIES["least_loaded"].weights(
        [Taker(name="a", slots=1, service_s=1000.0), Taker(name="b", slots=1, service_s=0.001)]
    )

    assert weights["a"] >= 0.02


def test_least_loaded_takes_missing_reports_of_everybody_for_a_fault_of_the_reports() -> None:
    weights = POLICIES["least_loaded"].weights(
        [Taker(name="a", slots=4, freshness_ratio=0.0), Taker(name="b", slots=4, freshness_ratio=0.0)]
    )

    assert weights == {"a": 0.5, "b": 0.5}
