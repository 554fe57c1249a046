"""Stories of the placement state machine, told in seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from fleet_contracts.base import Modality, Stage, WorkerId
from fleet_contracts.control import ModelCard, RoutingTable, Telemetry, WorkerInfo
from fleet_placement.core.events import (
    BacklogMeasured,
    Deposed,
    Effect,
    Event,
    Interrupted,
    Leading,
    ModelWanted,
    PublishTable,
    ReportDoubted,
    TelemetryReceived,
    Tick,
    WorkerGone,
    WorkerSeen,
)
from fleet_placement.core.machine import step
from fleet_placement.core.policies import POLICIES
from fleet_placement.core.state import PlacementConfig, PlacementState

CHAT = ModelCard(model="chat", context_tokens=2048, input_modalities=(Modality.TEXT,))


def worker(name: str, pool: str = "decode-a", state: str = "ready", **changes: object) -> WorkerInfo:
    fields: dict[str, object] = {
        "worker_id": WorkerId(name),
        "stage": Stage.DECODE,
        "pool": pool,
        "host": "h",
        "pid": 1,
        "state": state,
        "slots": 4,
        "locality": "boot-1",
        "cards": (CHAT,),
    }
    return WorkerInfo(**{**fields, **changes})  # type: ignore[arg-type]


def report(name: str, service_s: float, pool: str = "decode-a", **changes: object) -> Telemetry:
    fields: dict[str, object] = {
        "worker_id": WorkerId(name),
        "stage": Stage.DECODE,
        "pool": pool,
        "sent_unix_s": 0.0,
        "slots": 4,
        "state": "ready",
        "service_s": service_s,
        "completed_total": 10,
    }
    return Telemetry(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class Story:
    """Runs the machine as the service does: every event at `now_s`, a tick and reports each second."""

    config: PlacementConfig = field(default_factory=lambda: PlacementConfig(policy=POLICIES["least_loaded"]))
    state: PlacementState = field(default_factory=PlacementState)
    now_s: float = 100.0
    tables: list[RoutingTable] = field(default_factory=list)
    doubts: list[ReportDoubted] = field(default_factory=list)

    def happen(self, *events: Event) -> Story:
        for event in events:
            self.state, effects = step(self.config, self.state, event, self.now_s)
            self._keep(effects)
        return self

    def _keep(self, effects: tuple[Effect, ...]) -> None:
        self.tables += [effect.table for effect in effects if isinstance(effect, PublishTable)]
        self.doubts += [effect for effect in effects if isinstance(effect, ReportDoubted)]

    def seconds(self, count: int, service_s: dict[str, float]) -> Story:
        """Let time pass with these workers reporting."""
        for _ in range(count):
            self.now_s += 1.0
            self.happen(*(TelemetryReceived(report(name, value)) for name, value in service_s.items()), Tick())
        return self

    def share(self, name: str) -> float:
        shares = [
            share.share_ratio
            for route in self.tables[-1].routes
            for pool in route.pools
            for share in pool.workers
            if share.worker_id == name
        ]
        return shares[0] if shares else 0.0

    def weights(self) -> dict[str, float]:
        return {pool.pool: pool.weight_ratio for route in self.tables[-1].routes for pool in route.pools}


@pytest.fixture
def pair() -> Story:
    """Two equal workers that have been measured, the broker's grace over."""
    story = Story().happen(Leading(None), WorkerSeen(worker("decode-0")), WorkerSeen(worker("decode-1")))
    return story.seconds(10, {"decode-0": 0.1, "decode-1": 0.1})


def test_the_first_worker_makes_a_first_table_at_once() -> None:
    story = Story().happen(Leading(None), WorkerSeen(worker("decode-0")))

    assert [table.revision for table in story.tables] == [1]
    assert story.share("decode-0") == 1.0
    assert [card.model for card in story.tables[0].models] == ["chat"]
    assert story.tables[0].routes[0].pools[0].locality == "boot-1"


def test_nothing_is_published_while_nothing_changes(pair: Story) -> None:
    before = len(pair.tables)

    pair.seconds(30, {"decode-0": 0.1, "decode-1": 0.1})

    assert len(pair.tables) == before


def test_a_worker_slowed_fourfold_loses_share_within_two_tables(pair: Story) -> None:
    before = len(pair.tables)

    pair.seconds(10, {"decode-0": 0.1, "decode-1": 0.4})

    assert len(pair.tables) - before <= 2
    assert pair.share("decode-1") < 0.3
    assert any("decode-1 slowed: service" in reason for reason in pair.tables[before].reasons)


def test_a_worker_that_recovers_gets_its_share_back(pair: Story) -> None:
    pair.seconds(20, {"decode-0": 0.1, "decode-1": 0.4})

    pair.seconds(20, {"decode-0": 0.1, "decode-1": 0.1})

    assert pair.share("decode-1") == pytest.approx(0.5, abs=0.03)


def test_a_worker_whose_items_never_end_loses_share(pair: Story) -> None:
    for _ in range(10):
        pair.now_s += 1.0
        stuck = report("decode-1", 0.0, in_flight=2)
        pair.happen(TelemetryReceived(report("decode-0", 0.1)), TelemetryReceived(stuck), Tick())

    assert pair.share("decode-1") < 0.1


def test_noise_does_not_make_tables(pair: Story) -> None:
    noise = random.Random(7)
    before = len(pair.tables)

    for _ in range(60):
        pair.seconds(1, {name: 0.1 * noise.uniform(0.95, 1.05) for name in ("decode-0", "decode-1")})

    assert len(pair.tables) == before


def test_a_dead_worker_leaves_the_table(pair: Story) -> None:
    pair.happen(WorkerGone(WorkerId("decode-1")))
    pair.seconds(1, {"decode-0": 0.1})

    assert pair.share("decode-0") == 1.0
    assert "decode-1 is gone, share 0.50 -> 0.00" in pair.tables[-1].reasons


def test_a_lease_that_blinks_costs_nothing(pair: Story) -> None:
    before = len(pair.tables)

    pair.happen(WorkerGone(WorkerId("decode-1")))
    pair.now_s += 0.2
    pair.happen(Tick(), WorkerSeen(worker("decode-1")))
    pair.seconds(3, {"decode-0": 0.1, "decode-1": 0.1})

    assert len(pair.tables) == before


@pytest.mark.parametrize("state", ["draining", "paused", "stalled"])
def test_a_worker_that_takes_no_work_gets_nothing_at_once(pair: Story, state: str) -> None:
    before = len(pair.tables)

    pair.happen(WorkerSeen(worker("decode-1", state=state)))

    assert len(pair.tables) == before + 1
    assert pair.share("decode-1") == 0.0
    assert f"decode-1 is {state}, share 0.50 -> 0.00" in pair.tables[-1].reasons


def test_a_silent_worker_gets_nothing_though_its_lease_stands(pair: Story) -> None:
    pair.seconds(6, {"decode-0": 0.1})

    assert pair.share("decode-1") == 0.0
    assert pair.share("decode-0") == 1.0


def test_after_an_outage_of_the_broker_nobody_is_taken_for_dead(pair: Story) -> None:
    before = len(pair.tables)
    pair.now_s += 6.0

    pair.happen(Interrupted(), WorkerGone(WorkerId("decode-0")), WorkerGone(WorkerId("decode-1")), Tick())
    pair.now_s += 2.0
    pair.happen(WorkerSeen(worker("decode-0")), WorkerSeen(worker("decode-1")))
    pair.seconds(10, {"decode-0": 0.1, "decode-1": 0.1})

    assert len(pair.tables) == before


def test_a_worker_that_died_in_the_outage_leaves_after_the_grace(pair: Story) -> None:
    pair.happen(Interrupted(), WorkerGone(WorkerId("decode-1")))

    pair.seconds(int(pair.config.grace_s) + 1, {"decode-0": 0.1})

    assert pair.share("decode-0") == 1.0


def test_a_pool_without_workers_stays_known_and_is_forgotten_later(pair: Story) -> None:
    pair.happen(WorkerGone(WorkerId("decode-0")), WorkerGone(WorkerId("decode-1")))

    pair.seconds(2, {})

    assert pair.weights() == {"decode-a": 1.0}
    assert pair.tables[-1].routes[0].pools[0].workers == ()
    assert "decode of chat has no live worker" in pair.tables[-1].reasons

    pair.seconds(int(pair.config.forget_s) + 1, {})

    assert pair.tables[-1].routes == ()
    assert "model chat is forgotten: no worker came back" in pair.tables[-1].reasons


def test_pools_of_a_route_share_by_load(pair: Story) -> None:
    pair.happen(WorkerSeen(worker("decode-2", pool="decode-b")))
    assert pair.weights()["decode-a"] == pytest.approx(2 / 3, abs=0.03)

    for _ in range(10):
        pair.now_s += 1.0
        pair.happen(
            TelemetryReceived(report("decode-0", 0.1)),
            TelemetryReceived(report("decode-1", 0.1)),
            TelemetryReceived(report("decode-2", 0.1, pool="decode-b")),
            BacklogMeasured({(Stage.DECODE, "decode-a"): 400}),
            Tick(),
        )

    assert pair.weights()["decode-a"] < 0.4
    assert any(reason.startswith("pool decode-a for decode of chat: weight") for reason in pair.tables[-1].reasons)


def test_a_pool_without_live_workers_gets_nothing_beside_one_that_has(pair: Story) -> None:
    pair.happen(WorkerSeen(worker("decode-2", pool="decode-b")), WorkerGone(WorkerId("decode-2")))

    pair.seconds(2, {"decode-0": 0.1, "decode-1": 0.1})

    assert pair.weights() == {"decode-a": 1.0, "decode-b": 0.0}


def test_a_standby_publishes_nothing_and_continues_the_revision_when_it_leads(pair: Story) -> None:
    standby = Story().happen(WorkerSeen(worker("decode-0")), WorkerSeen(worker("decode-1")))
    standby.seconds(5, {"decode-0": 0.1, "decode-1": 0.1})
    assert standby.tables == []

    standby.happen(Leading(pair.tables[-1]))
    assert standby.tables == []
    standby.happen(WorkerSeen(worker("decode-2")))

    assert standby.tables[-1].revision == pair.tables[-1].revision + 1


def test_a_fresh_leader_does_not_drop_workers_it_has_not_seen_yet(pair: Story) -> None:
    fresh = Story().happen(Leading(pair.tables[-1]), WorkerSeen(worker("decode-0")), Tick())

    assert fresh.tables == []

    fresh.seconds(int(fresh.config.grace_s) + 1, {"decode-0": 0.1})

    assert fresh.share("decode-0") == 1.0


def test_a_deposed_leader_is_quiet(pair: Story) -> None:
    before = len(pair.tables)

    pair.happen(Deposed(), WorkerGone(WorkerId("decode-1")))
    pair.seconds(10, {"decode-0": 0.1})

    assert len(pair.tables) == before


def test_nonsense_is_dropped_with_a_reason_and_said_once(pair: Story) -> None:
    for _ in range(3):
        pair.happen(TelemetryReceived(report("decode-1", float("nan"), queued={"realtime": -3})))

    assert len(pair.doubts) == 1
    assert pair.doubts[0].worker_id == "decode-1"
    assert len(pair.doubts[0].reasons) == 2
    assert pair.state.workers[WorkerId("decode-1")].measured.service_s == pytest.approx(0.1)  # type: ignore[union-attr]


def test_a_report_of_another_pool_is_not_believed(pair: Story) -> None:
    pair.happen(TelemetryReceived(report("decode-1", 9.0, pool="elsewhere")))

    assert pair.state.workers[WorkerId("decode-1")].measured.service_s == pytest.approx(0.1)  # type: ignore[union-attr]
    assert "registered in decode/decode-a" in pair.doubts[0].reasons[0]


def test_a_restarted_worker_is_measured_anew(pair: Story) -> None:
    pair.seconds(5, {"decode-0": 0.1, "decode-1": 0.4})

    pair.happen(WorkerSeen(worker("decode-1", pid=2)))

    assert pair.state.workers[WorkerId("decode-1")].measured is None


def test_a_model_gets_the_facts_of_its_media_from_its_encoder() -> None:
    seen = (Modality.IMAGE, Modality.AUDIO)
    encoder = ModelCard(
        model="chat", input_modalities=seen, image_tokens=16, hidden_size=576, max_images=8, max_audios=2
    )
    vision = worker("vision-0", pool="vision-cpu", stage=Stage.VISION_ENCODE, cards=(encoder,))

    story = Story().happen(Leading(None), WorkerSeen(vision), WorkerSeen(worker("decode-0")))

    card = story.tables[-1].model_card("chat")
    assert card is not None
    assert card.image_tokens == 16
    assert (card.max_images, card.max_audios) == (8, 2)
    assert card.input_modalities == (Modality.TEXT, Modality.IMAGE, Modality.AUDIO)


def test_workers_of_one_pool_on_two_hosts_share_no_arena(pair: Story) -> None:
    pair.happen(WorkerSeen(worker("decode-2", locality="boot-2")))

    assert pair.tables[-1].routes[0].pools[0].locality == ""


def test_a_model_that_was_taken_off_leaves_the_table_with_its_last_worker() -> None:
    story = Story().happen(Leading(None), WorkerSeen(worker("decode-0"))).seconds(10, {"decode-0": 0.1})

    story.happen(ModelWanted("chat", is_wanted=False)).seconds(2, {"decode-0": 0.1})
    while_staffed = [card.model for card in story.tables[-1].models]
    leaving = msgspec.structs.replace(worker("decode-0"), state="draining")
    story.happen(WorkerSeen(leaving), WorkerGone(WorkerId("decode-0"))).seconds(2, {})

    assert while_staffed == ["chat"]
    assert (story.tables[-1].models, story.tables[-1].routes) == ((), ())


def test_a_pool_of_a_model_that_was_taken_off_stays_while_it_holds_work() -> None:
    story = Story().happen(Leading(None), WorkerSeen(worker("decode-0"))).seconds(10, {"decode-0": 0.1})
    leaving = msgspec.structs.replace(worker("decode-0"), state="draining")
    held = frozenset({(Stage.DECODE, worker("decode-0").pool)})

    story.happen(BacklogMeasured({}, held), ModelWanted("chat", is_wanted=False))
    story.happen(WorkerSeen(leaving), WorkerGone(WorkerId("decode-0"))).seconds(5, {})
    while_held = [card.model for card in story.tables[-1].models]
    story.happen(BacklogMeasured({}, frozenset())).seconds(2, {})

    assert while_held == ["chat"]
    assert story.tables[-1].models == ()


def test_a_model_that_is_wanted_again_is_remembered_without_workers() -> None:
    story = Story().happen(Leading(None), WorkerSeen(worker("decode-0"))).seconds(10, {"decode-0": 0.1})

    story.happen(ModelWanted("chat", is_wanted=False), ModelWanted("chat", is_wanted=True))
    story.happen(WorkerGone(WorkerId("decode-0"))).seconds(30, {})

    assert [card.model for card in story.tables[-1].models] == ["chat"]
