"""Which pictures step together: places by class, one shape per pass, deadlines instead of arrival."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fleet_diffusion.core.steps import Job, StepPolicy, StepScheduler

SMALL, LARGE = (64, 64), (128, 128)
REALTIME, BATCH, BACKGROUND = 0, 1, 2


def job(
    key: str,
    *,
    shape: tuple[int, int] = SMALL,
    rank: int = REALTIME,
    deadline: float = 1e6,
    enqueued: float = 0.0,
    steps: int = 4,
) -> Job:
    return Job(key, shape, rank, deadline, enqueued, steps)


def scheduler(slots: int = 4, max_batch: int = 4, aging_s: float = 30.0) -> StepScheduler:
    return StepScheduler(StepPolicy(slots, max_batch, aging_s))


def test_pictures_at_different_steps_take_the_next_one_together() -> None:
    steps = scheduler()
    steps.add(job("a"))
    assert steps.tick(0.0).step == ("a",)
    steps.advanced(["a"], 0.1)
    steps.add(job("b"))

    tick = steps.tick(0.1)

    assert tick.admit == ("b",)
    assert set(tick.step) == {"a", "b"}


def test_pictures_of_another_shape_never_share_a_pass() -> None:
    steps = scheduler()
    for name, shape in (("a", SMALL), ("b", LARGE), ("c", SMALL)):
        steps.add(job(name, shape=shape))

    assert set(steps.tick(0.0).step) in ({"a", "c"}, {"b"})


def test_a_pass_holds_at_most_max_batch() -> None:
    steps = scheduler(slots=8, max_batch=3)
    for index in range(8):
        steps.add(job(f"j{index}"))

    assert len(steps.tick(0.0).step) == 3


def test_a_picture_is_finished_by_its_own_last_step() -> None:
    steps = scheduler()
    steps.add(job("short", steps=1))
    steps.add(job("long", steps=2))
    together = steps.tick(0.0).step

    assert steps.advanced(together, 0.1) == ("short",)


def test_a_realtime_picture_takes_the_place_of_a_background_one() -> None:
    steps = scheduler(slots=2)
    steps.add(job("back0", rank=BACKGROUND, deadline=100.0))
    steps.add(job("back1", rank=BACKGROUND, deadline=200.0))
    steps.advanced(steps.tick(0.0).step, 0.1)
    steps.add(job("now"))

    tick = steps.tick(0.1)

    assert tick.park == ("back1",)
    assert tick.admit == ("now",)
    assert set(tick.step) == {"now", "back0"}


def test_a_parked_picture_comes_back_where_it_was() -> None:
    steps = scheduler(slots=1)
    steps.add(job("back", rank=BACKGROUND, steps=2))
    steps.advanced(steps.tick(0.0).step, 0.1)
    steps.add(job("now", steps=1))
    assert steps.advanced(steps.tick(0.1).step, 0.1) == ("now",)
    steps.remove("now")

    tick = steps.tick(0.2)

    assert tick.admit == ("back",)
    assert steps.advanced(tick.step, 0.1) == ("back",)


def test_nobody_gives_way_within_a_class() -> None:
    steps = scheduler(slots=1)
    steps.add(job("first", deadline=1000.0))
    steps.tick(0.0)
    steps.add(job("second", deadline=10.0))

    assert steps.tick(0.1).park == ()


def test_an_old_background_picture_is_not_sent_away_again() -> None:
    steps = scheduler(slots=1, aging_s=30.0)
    steps.add(job("back", rank=BACKGROUND, enqueued=0.0))
    steps.tick(31.0)
    steps.add(job("now", enqueued=31.0))

    assert steps.tick(31.1).park == ()


def test_a_removed_picture_is_in_no_later_decision() -> None:
    steps = scheduler()
    steps.add(job("gone"))
    steps.add(job("stays"))
    steps.tick(0.0)
    steps.remove("gone")

    assert steps.tick(0.1).step == ("stays",)
    assert steps.advanced(["gone", "stays"], 0.1) == ()


def test_a_picture_that_begins_again_takes_all_its_steps() -> None:
    steps = scheduler()
    steps.add(job("a", steps=2))
    steps.advanced(steps.tick(0.0).step, 0.1)
    steps.begun("a", 2)

    assert steps.advanced(steps.tick(0.1).step, 0.1) == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([SMALL, LARGE]),
            st.integers(0, 2),
            st.floats(1, 100),
            st.floats(0, 10),
            st.integers(1, 6),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_picture_is_finished_once_and_places_are_never_exceeded(
    wanted: list[tuple[tuple[int, int], int, float, float, int]], slots: int, max_batch: int
) -> None:
    steps = scheduler(slots, max_batch, aging_s=2.0)
    arrivals = sorted(
        (enqueued, f"j{i}", shape, rank, deadline, count)
        for i, (shape, rank, deadline, enqueued, count) in enumerate(wanted)
    )
    now, taken = 0.0, dict.fromkeys((name for _, name, *_ in arrivals), 0)
    finished: list[str] = []
    running: set[str] = set()
    while len(finished) < len(wanted):
        while arrivals and arrivals[0][0] <= now:
            enqueued, name, shape, rank, deadline, count = arrivals.pop(0)
            steps.add(Job(name, shape, rank, deadline, enqueued, count))
        tick = steps.tick(now)
        assert set(tick.park) <= running
        running = (running - set(tick.park)) | set(tick.admit)
        assert len(running) <= slots
        assert set(tick.step) <= running
        assert len(tick.step) <= max_batch
        for name in tick.step:
            taken[name] += 1
        for name in steps.advanced(tick.step, 0.05):
            steps.remove(name)
            running.discard(name)
            finished.append(name)
        now += 0.05

    assert sorted(finished) == sorted(taken)
    assert taken == {f"j{i}": count for i, (*_, count) in enumerate(wanted)}


def _attainment(order_by_deadline: bool, seed: int) -> float:
    """Share of pictures done before their deadline; passes cost by size, small ones are wanted sooner."""
    rng = random.Random(seed)
    cost_s = {SMALL: 0.02, LARGE: 0.08}
    arrivals = []
    at_s = 0.0
    for index in range(120):
        at_s += rng.expovariate(2.6)
        shape = SMALL if rng.random() < 0.7 else LARGE
        arrivals.append((at_s, f"j{index:03}", shape, at_s + (1.2 if shape == SMALL else 8.0)))
    steps = scheduler(slots=64, max_batch=4, aging_s=1e9)
    queue: list[tuple[float, str, tuple[int, int], float]] = []
    left: dict[str, int] = {}
    deadlines = {name: deadline for _, name, _, deadline in arrivals}
    now, on_time = 0.0, 0
    while arrivals or left:
        while arrivals and arrivals[0][0] <= now:
            arrived = arrivals.pop(0)
            at, name, shape, deadline = arrived
            left[name] = 20
            queue.append(arrived)
            steps.add(Job(name, shape, 0, deadline, at, 20))
        if not left:
            now = arrivals[0][0]
            continue
        if order_by_deadline:
            keys = steps.tick(now).step
        else:
            # First come, first served, with the same batching of one shape.
            first = next(entry for entry in queue if entry[1] in left)
            keys = tuple(entry[1] for entry in queue if entry[1] in left and entry[2] == first[2])[:4]
        shape = next(entry[2] for entry in queue if entry[1] == keys[0])
        took_s = cost_s[shape] * (0.6 + 0.4 * len(keys))
        now += took_s
        if order_by_deadline:
            steps.advanced(keys, took_s)
        for name in keys:
            left[name] -= 1
            if left[name] == 0:
                del left[name]
                steps.remove(name)
                on_time += now <= deadlines[name]
    return on_time / 120


def test_deadlines_are_met_more_often_than_in_order_of_arrival() -> None:
    by_deadline = [_attainment(True, seed) for seed in range(5)]
    by_arrival = [_attainment(False, seed) for seed in range(5)]

    assert sum(by_deadline) > sum(by_arrival) + 0.25
    assert all(ours >= theirs for ours, theirs in zip(by_deadline, by_arrival, strict=True))
