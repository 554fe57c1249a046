"""Stories of the request state machine: fences, claims, resends, resubmission, the end."""

from __future__ import annotations

from fleet_contracts.base import RequestId, Stage, StepId, WorkerId
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import (
    Attempt,
    ChoiceProgress,
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Failure,
    Finished,
    Progress,
    RootLost,
    Started,
    StepDone,
    Token,
    Usage,
    WorkerMessage,
)
from fleet_contracts.preprocess import MediaItem, PreprocessParams
from fleet_contracts.vision import VisionParams
from fleet_contracts.work import RESUBMIT_STRIDE, Plan, PlanStep
from fleet_ingress.core.request_state import (
    MAX_RESENDS,
    CancelWork,
    Dropped,
    Effect,
    End,
    Reply,
    RequestState,
    Resubmit,
    StatePolicy,
)
from fleet_ingress.core.token_stream import Delta

PRE, ENC, DEC = StepId("pre"), StepId("enc0"), StepId("dec")
USAGE = Usage(prompt_tokens=3, completion_tokens=2)
BAD_INPUT = Failure(error_type="invalid_request_error", code="invalid_image", message="no image", status=400)

PLAN = Plan(
    steps=(
        PlanStep(step_id=PRE, stage=Stage.PREPROCESS, model="m", params=PreprocessParams()),
        PlanStep(step_id=ENC, stage=Stage.VISION_ENCODE, model="m", params=VisionParams(items=(0,)), needs=(PRE,)),
        PlanStep(step_id=DEC, stage=Stage.DECODE, model="m", params=DecodeParams(), needs=(PRE, ENC)),
    )
)


def new_state(**policy: float) -> RequestState:
    limits = StatePolicy(resubmit_after_s=policy.get("after", 20.0), max_resubmissions=int(policy.get("most", 2)))
    return RequestState(plan=PLAN, deadline_s=100.0, policy=limits, last_move_s=0.0)


def attempt(step_id: StepId = DEC, *, epoch: int = 0, delivery: int = 1) -> Attempt:
    return Attempt(
        request_id=RequestId("i_r"),
        step_id=step_id,
        stage=PLAN.step(step_id).stage,
        worker_id=WorkerId("w"),
        epoch=epoch,
        delivery=delivery,
    )


def token(seq: int, index: int, text: str = "", *, by: Attempt | None = None, **more: object) -> Token:
    fields = {"text_offset": index, "token_ids": (index,), "choice": 0, **more}
    return Token(attempt=by or attempt(), seq=seq, index=index, text=text or chr(ord("a") + index), **fields)


def tell(state: RequestState, *messages: WorkerMessage, now_s: float = 1.0) -> list[Effect]:
    effects: list[Effect] = []
    for message in messages:
        effects.extend(state.on_message(message, now_s, 1_000.0 + now_s))
    return effects


def text_of(effects: list[Effect]) -> str:
    return "".join(effect.text for effect in effects if isinstance(effect, Delta))


def finished(seq: int, num_tokens: int, by: Attempt | None = None) -> Finished:
    return Finished(attempt=by or attempt(), seq=seq, usage=USAGE, num_tokens=(num_tokens,))


def test_tokens_in_order_flow_and_the_end_is_accepted() -> None:
    state = new_state()

    effects = tell(
        state,
        Started(attempt=attempt(), seq=0),
        token(1, 0),
        token(2, 1, finish_reason="stop"),
        finished(3, 2),
    )

    assert text_of(effects) == "ab"
    assert [End(usage=USAGE), Reply(Confirm(status="accepted"))] == effects[-2:]


def test_duplicates_show_nothing_twice() -> None:
    state = new_state()

    effects = tell(state, Started(attempt=attempt(), seq=0), token(1, 0), token(1, 0), token(2, 1), token(1, 0))

    assert text_of(effects) == "ab"


def test_events_out_of_order_wait_for_the_gap_to_close() -> None:
    state = new_state()

    early = tell(state, Started(attempt=attempt(), seq=0), token(2, 1), token(3, 2))
    late = tell(state, token(1, 0))

    assert text_of(early) == ""
    assert text_of(late) == "abc"


def test_lost_event_is_asked_for_again_from_the_first_missing_number() -> None:
    state = new_state()

    effects = tell(state, Started(attempt=attempt(), seq=0), token(1, 0), token(3, 2), finished(4, 3))
    again = tell(state, token(2, 1), token(3, 2), finished(4, 3))

    assert Reply(Confirm(status="resend", resend_from_seq=2)) == effects[-1]
    assert text_of(effects) == "a"
    assert text_of(again) == "bc"
    assert Reply(Confirm(status="accepted")) == again[-1]


def test_worker_that_cannot_close_the_gap_fails_the_request() -> None:
    state = new_state()

    for _ in range(MAX_RESENDS):
        assert Reply(Confirm(status="resend", resend_from_seq=0)) == tell(state, finished(2, 1))[-1]
    effects = tell(state, finished(2, 1))

    assert state.end.failure.code == "stream_incomplete"
    assert Reply(Confirm(status="accepted")) == effects[-1]


def test_tokens_missing_without_a_gap_in_the_numbers_are_asked_for_from_the_start() -> None:
    state = new_state()

    effects = tell(state, Started(attempt=attempt(), seq=0), token(1, 0), finished(2, 2))

    assert Reply(Confirm(status="resend", resend_from_seq=0)) == effects[-1]


def test_lost_confirmation_is_given_again_to_the_same_attempt_only() -> None:
    state = new_state()
    tell(state, Started(attempt=attempt(), seq=0), finished(1, 0))

    again = tell(state, finished(1, 0))
    other = tell(state, finished(1, 0, by=attempt(delivery=2)))
    claim = tell(state, Claim(attempt=attempt(delivery=3)))

    assert [Reply(Confirm(status="accepted"))] == again
    assert [Reply(Confirm(status="gone"))] == other
    assert [Reply(ClaimReply(status="gone"))] == claim


def test_claim_raises_the_fence_and_tells_what_the_client_has() -> None:
    state = new_state()
    old, new = attempt(), attempt(delivery=2)
    tell(state, Started(attempt=old, seq=0), token(1, 0), token(3, 2))

    granted = tell(state, Claim(attempt=new))
    stale = tell(state, token(2, 1, by=old), finished(4, 3, by=old), Claim(attempt=old))
    effects = tell(state, Started(attempt=new, seq=0), token(1, 1, by=new), finished(2, 2, by=new))

    progress = ChoiceProgress(token_ids=(0,), num_text_chars=1)
    assert [Reply(ClaimReply(status="granted", choices=(progress,)))] == granted
    refusals = [Reply(Confirm(status="stale", fence_epoch=0)), Reply(ClaimReply(status="stale", fence_epoch=0))]
    assert [Dropped("stale"), *refusals] == stale
    assert text_of(effects) == "b"
    assert next(e.finish_reason for e in effects if isinstance(e, Delta) and e.finish_reason) == "stop"


def test_numbers_of_an_earlier_attempt_do_not_close_a_gap_of_the_next() -> None:
    state = new_state()
    new = attempt(delivery=2)
    tell(state, Started(attempt=attempt(), seq=0), token(1, 0), token(2, 1), token(3, 2), Claim(attempt=new))

    # The new attempt's only event with text, number 1, is lost; it had no ids left to send.
    effects = tell(state, Started(attempt=new, seq=0), finished(2, 3, by=new))

    assert Reply(Confirm(status="resend", resend_from_seq=1)) == effects[-1]


def test_claim_counts_tokens_whose_text_is_held_back() -> None:
    state = new_state()
    held = Token(attempt=attempt(), seq=1, choice=0, index=0, token_ids=(5, 6), text="", text_offset=0)
    tell(state, Started(attempt=attempt(), seq=0), held)

    granted = tell(state, Claim(attempt=attempt(delivery=2)))

    progress = ChoiceProgress(token_ids=(5, 6), num_text_chars=0)
    assert [Reply(ClaimReply(status="granted", choices=(progress,)))] == granted


def test_repeated_prefix_with_other_tokens_ends_in_an_error_not_a_seam() -> None:
    state = new_state()
    new = attempt(delivery=2)
    tell(state, Started(attempt=attempt(), seq=0), token(1, 0), Claim(attempt=new))

    effects = tell(state, token(0, 0, by=new, token_ids=(99,)))

    assert state.end.failure.code == "stream_diverged"
    assert CancelWork("stream_diverged") in effects


def test_higher_epoch_outranks_any_delivery() -> None:
    state = new_state()
    tell(state, Claim(attempt=attempt(epoch=1, delivery=1)))

    effects = tell(state, finished(0, 0, by=attempt(epoch=0, delivery=4)))

    assert [Reply(Confirm(status="stale", fence_epoch=1))] == effects


def test_failure_of_any_step_ends_the_request_and_stops_its_branches() -> None:
    state = new_state()

    effects = tell(state, Failed(attempt=attempt(ENC), seq=1, failure=BAD_INPUT))

    assert [End(failure=BAD_INPUT), CancelWork("failed_elsewhere"), Reply(Confirm(status="accepted"))] == effects


def test_failure_keeps_what_was_shown_before() -> None:
    state = new_state()

    effects = tell(
        state, Started(attempt=attempt(), seq=0), token(1, 0), Failed(attempt=attempt(), seq=2, failure=BAD_INPUT)
    )

    assert text_of(effects) == "a"
    assert End(failure=BAD_INPUT) in effects


def test_deadline_fails_with_504_and_cancels_once() -> None:
    state = new_state()

    before = state.on_tick(99.9)
    effects = state.on_tick(100.0)
    after = state.on_tick(101.0)

    assert before == []
    assert effects[0].failure.status == 504
    assert [CancelWork("deadline")] == effects[1:]
    assert after == []


def test_queued_request_is_never_silent() -> None:
    state = new_state(after=20.0)
    tell(state, Started(attempt=attempt(PRE), seq=0), _done(PRE), now_s=1.0)

    assert state.on_tick(90.0) == []


def test_silent_running_step_is_resubmitted_a_bounded_number_of_times() -> None:
    state = new_state(after=20.0, most=1)
    tell(state, Started(attempt=attempt(PRE), seq=0), now_s=1.0)

    assert state.on_tick(20.0) == []
    assert [Resubmit(epoch=RESUBMIT_STRIDE, reason="silence")] == state.on_tick(21.0)
    tell(state, Started(attempt=attempt(PRE, epoch=RESUBMIT_STRIDE), seq=0), now_s=22.0)
    assert state.on_tick(60.0) == []


def test_step_that_shows_that_it_lives_is_not_silent() -> None:
    state = new_state(after=20.0)
    tell(state, Started(attempt=attempt(PRE), seq=0), now_s=1.0)
    tell(state, Progress(attempt=attempt(PRE), seq=1, done_ratio=0.0), now_s=19.0)

    assert state.on_tick(38.0) == []
    assert [Resubmit(epoch=RESUBMIT_STRIDE, reason="silence")] == state.on_tick(39.0)


def test_two_branches_that_lost_the_root_cause_one_resubmission() -> None:
    state = new_state()

    first = tell(state, RootLost(attempt=attempt(PRE)))
    second = tell(state, RootLost(attempt=attempt(DEC)))

    accepted = Reply(Confirm(status="accepted"))
    assert [Resubmit(epoch=RESUBMIT_STRIDE, reason="root_lost"), accepted] == first
    assert [accepted] == second


def test_root_lost_after_a_resubmission_counts_again() -> None:
    state = new_state(most=2)
    tell(state, RootLost(attempt=attempt(PRE)))

    # Epochs are sums over inputs: the decode step of generation 1 is at twice the stride.
    effects = tell(state, RootLost(attempt=attempt(DEC, epoch=2 * RESUBMIT_STRIDE)))
    given_up = tell(state, RootLost(attempt=attempt(PRE, epoch=2 * RESUBMIT_STRIDE)))

    assert Resubmit(epoch=2 * RESUBMIT_STRIDE, reason="root_lost") == effects[0]
    assert given_up[0].failure.status == 503


def test_resubmission_outranks_repairs_of_repairs() -> None:
    """Decode of generation 1 is at twice the stride; what it and then the encoder ran again is in reach of the next."""
    state = new_state()
    tell(state, RootLost(attempt=attempt(PRE)))
    repaired = 2 * RESUBMIT_STRIDE + 2

    first, _ = tell(state, RootLost(attempt=attempt(PRE, epoch=repaired)))
    again = tell(state, RootLost(attempt=attempt(PRE, epoch=repaired, delivery=2)))

    assert isinstance(first, Resubmit) and first.epoch > repaired
    assert [Reply(Confirm(status="accepted"))] == again
    assert state.num_resubmissions == 2


def test_silence_is_ended_above_everything_heard_of() -> None:
    state = new_state(after=20.0)
    tell(state, RootLost(attempt=attempt(PRE)))
    tell(state, Started(attempt=attempt(ENC, epoch=5 * RESUBMIT_STRIDE + 1), seq=0), now_s=1.0)

    assert [Resubmit(epoch=6 * RESUBMIT_STRIDE, reason="silence")] == state.on_tick(21.0)


def test_client_that_leaves_cancels_the_work_and_late_ends_are_gone() -> None:
    state = new_state()

    effects = state.on_abandon("client_left")
    late = tell(state, finished(1, 0))

    assert [End(), CancelWork("client_left")] == effects
    assert [Reply(Confirm(status="gone"))] == late
    assert state.on_abandon("client_left") == []


def test_timeline_has_a_row_per_attempt_and_media_as_the_encoder_saw_them() -> None:
    state = new_state()
    item = MediaItem(part="p", kind="image", width=2, height=3, mode="RGB", sha256="s", num_tokens=4)
    hit = MediaItem(part="p", kind="image", width=2, height=3, mode="RGB", sha256="s", num_tokens=4, cache_hit=True)

    tell(state, Started(attempt=attempt(PRE), seq=0), _done(PRE, (item,)))
    tell(state, _done(ENC, (hit,)), _done(PRE, (item,), delivery=2), Started(attempt=attempt(), seq=0))

    rows = [(row.step, row.delivery, row.outcome) for row in state.timeline.rows.values()]
    assert rows == [("pre", 1, "ok"), ("enc0", 1, "ok"), ("pre", 2, "ok"), ("dec", 1, "running")]
    assert [media.cache_hit for media in state.timeline.media.values()] == [True]


def test_finished_from_a_step_in_the_middle_is_refused() -> None:
    state = new_state()

    effects = tell(state, finished(1, 0, by=attempt(ENC)))

    assert [Reply(Confirm(status="stale")), Dropped("unexpected")] == effects
    assert state.end is None


def _done(step_id: StepId, media: tuple[MediaItem, ...] = (), delivery: int = 1) -> StepDone:
    return StepDone(
        attempt=attempt(step_id, delivery=delivery),
        seq=1,
        pool="p",
        queued_unix_s=1.0,
        started_unix_s=2.0,
        finished_unix_s=3.0,
        media=media,
    )
