"""Whatever the network and dying workers do to the events, the client gets the text once, whole and in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contracts.base import RequestId, Stage, StepId, WorkerId
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import (
    Attempt,
    ChoiceProgress,
    Claim,
    ClaimReply,
    Confirm,
    Finished,
    RequestEvent,
    Started,
    StepDone,
    Token,
    Usage,
)
from fleet_contracts.preprocess import PreprocessParams
from fleet_contracts.work import Plan, PlanStep
from fleet_ingress.core.request_state import Effect, End, Reply, RequestState, StatePolicy
from fleet_ingress.core.token_stream import Delta

_PRE, _DEC = StepId("pre"), StepId("dec")

#: Text each token lets go: some hold theirs back for the next.
_PIECES = st.lists(st.sampled_from(["a", "bc", "", "d😀", "\n"]), min_size=1, max_size=8)


@dataclass
class _World:
    """One ingress and what its client saw."""

    state: RequestState
    seen: list[Effect] = field(default_factory=list)

    def tell(self, message: RequestEvent | Claim) -> list[Effect]:
        effects = self.state.on_message(message, 1.0, 1.0)
        self.seen.extend(effects)
        return effects

    def ask(self, message: Claim | Finished) -> ClaimReply | Confirm:
        replies = [effect.message for effect in self.tell(message) if isinstance(effect, Reply)]
        assert len(replies) == 1
        return replies[0]


def _plan(num_choices: int) -> Plan:
    decode = DecodeParams(n=num_choices)
    return Plan(
        steps=(
            PlanStep(step_id=_PRE, stage=Stage.PREPROCESS, model="m", params=PreprocessParams()),
            PlanStep(step_id=_DEC, stage=Stage.DECODE, model="m", params=decode, needs=(_PRE,)),
        )
    )


@dataclass(frozen=True)
class _Answer:
    """What every choice says. With `is_flushed_late` the last text and the end come in an event without ids."""

    pieces: list[str]
    is_flushed_late: bool

    def tokens(self, choice: int, known: ChoiceProgress, by: Attempt, first_seq: int) -> list[Token]:
        """Events from where the client is; a continuation lets go of what its predecessor held back."""
        if known.finish_reason is not None:
            return []
        steps = [((index,), piece) for index, piece in enumerate(self.pieces)]
        if self.is_flushed_late:
            steps[-1] = (steps[-1][0], "")
            steps.append(((), self.pieces[-1]))
        tokens: list[Token] = []
        released, shown = 0, known.num_text_chars
        whole = "".join(self.pieces)
        for number, (ids, text) in enumerate(steps):
            released += len(text)
            if ids and ids[0] < len(known.token_ids):
                continue
            tokens.append(
                Token(
                    attempt=by,
                    seq=first_seq + len(tokens),
                    choice=choice,
                    index=ids[0] if ids else len(self.pieces),
                    token_ids=ids,
                    text=whole[shown : max(released, shown)],
                    text_offset=shown,
                    finish_reason="stop" if number == len(steps) - 1 else None,
                )
            )
            shown = max(released, shown)
        return tokens


def _events(answer: _Answer, known: tuple[ChoiceProgress, ...], by: Attempt, num_choices: int) -> list[RequestEvent]:
    """What an attempt says, its terminal event left out."""
    events: list[RequestEvent] = [Started(attempt=by, seq=0)]
    for choice in range(num_choices):
        progress = known[choice] if known else ChoiceProgress()
        events.extend(answer.tokens(choice, progress, by, len(events)))
    events.append(StepDone(attempt=by, seq=len(events), pool="p", queued_unix_s=0, started_unix_s=0, finished_unix_s=0))
    return events


def _noise(data: st.DataObject, events: list[RequestEvent]) -> list[RequestEvent]:
    """Events as a bad network delivers them: some lost, some twice, in any order."""
    arriving = data.draw(st.lists(st.sampled_from(events), max_size=2 * len(events)))
    return arriving if data.draw(st.booleans()) else [event for event in events if event in arriving]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.builds(_Answer, _PIECES, st.booleans()), st.integers(1, 2), st.integers(1, 4))
def test_text_arrives_exactly_once_under_any_loss_duplication_and_takeover(
    data: st.DataObject, answer: _Answer, num_choices: int, num_attempts: int
) -> None:
    plan = _plan(num_choices)
    world = _World(RequestState(plan=plan, deadline_s=1e9, policy=StatePolicy(), last_move_s=0.0))
    stragglers: list[RequestEvent] = []

    for delivery in range(1, num_attempts + 1):
        by = Attempt(
            request_id=RequestId("i_r"),
            step_id=_DEC,
            stage=Stage.DECODE,
            worker_id=WorkerId("w"),
            epoch=0,
            delivery=delivery,
        )
        known: tuple[ChoiceProgress, ...] = ()
        if delivery > 1:
            reply = world.ask(Claim(attempt=by))
            assert isinstance(reply, ClaimReply) and reply.status == "granted"
            known = reply.choices
        events = _events(answer, known, by, num_choices)
        if delivery < num_attempts:
            events = events[: data.draw(st.integers(0, len(events)))]
        for event in _noise(data, [*events, *stragglers]) if events or stragglers else []:
            world.tell(event)
        stragglers.extend(events)
        if delivery == num_attempts:
            _confirm(data, world, by, events, len(answer.pieces), num_choices)

    for choice in range(num_choices):
        deltas = [effect for effect in world.seen if isinstance(effect, Delta) and effect.choice == choice]
        assert "".join(answer.pieces) == "".join(delta.text for delta in deltas)
        assert len(answer.pieces) == sum(delta.num_tokens for delta in deltas)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
        assert deltas[-1].finish_reason == "stop"
    assert sum(isinstance(effect, End) for effect in world.seen) == 1


def _confirm(
    data: st.DataObject, world: _World, by: Attempt, events: list[RequestEvent], num_tokens: int, num_choices: int
) -> None:
    """Ask until accepted; after one more noisy resend the network is good."""
    usage = Usage(prompt_tokens=1, completion_tokens=num_tokens)
    finished = Finished(attempt=by, seq=len(events), usage=usage, num_tokens=(num_tokens,) * num_choices)
    for round_number in range(3):
        reply = world.ask(finished)
        if reply.status == "accepted":
            break
        assert isinstance(reply, Confirm) and reply.status == "resend"
        missing = events[reply.resend_from_seq :]
        for event in _noise(data, missing) if round_number == 0 else missing:
            world.tell(event)
    assert Confirm(status="accepted") == world.ask(finished)
    assert Confirm(status="gone") == world.ask(
        msgspec.structs.replace(finished, attempt=msgspec.structs.replace(by, delivery=99))
    )
