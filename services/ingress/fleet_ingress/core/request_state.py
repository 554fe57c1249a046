"""The life of one request at its ingress: a pure state machine, (state, event, now) -> effects.

    published ──Started/StepDone of any step──► moving ──Token──► streaming ──Finished/Failed──► ended
        ▲                                          │
        └── silence while a step runs, RootLost ◄──┘   resubmit at + RESUBMIT_STRIDE, a bounded number of times

Attempts of a step are fenced by (epoch, delivery): what a lower attempt says is dropped. A request ends once; the
attempt that ended it is told so again as often as it asks, everybody else is told that the request is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fleet_contracts.base import StepId
from fleet_contracts.decode import DecodeParams
from fleet_contracts.diffusion import DiffusionParams
from fleet_contracts.events import (
    Attempt,
    ChoiceProgress,
    Chunk,
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Failure,
    Finished,
    IngressReply,
    Picture,
    Progress,
    RootLost,
    Started,
    StepDone,
    Token,
    Usage,
    WorkerMessage,
)
from fleet_contracts.work import RESUBMIT_STRIDE, Plan, PlanStep
from fleet_ingress.core.media_stream import MediaDelta, MediaStream
from fleet_ingress.core.picture_stream import PictureMade, PictureStream, ProgressMade
from fleet_ingress.core.timeline import Timeline
from fleet_ingress.core.token_stream import AttemptLog, ChoiceStream, Delta, StreamDivergedError

#: A worker that cannot close a gap after this many resends never will.
MAX_RESENDS = 10

Fence = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the worker that asked."""

    message: IngressReply


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Publish the first step again at `epoch`, from the ingress's own copy of the root source."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Tell the fleet that nobody waits any longer."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The request is over; exactly one per request. `failure` and `usage` are both None when the client left."""

    usage: Usage | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """An event was of no use; only counted."""

    reason: str


Effect = Delta | MediaDelta | PictureMade | ProgressMade | Reply | Resubmit | CancelWork | End | Dropped


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Limits of the state machine.

    Attributes:
        resubmit_after_s: silence, while some step runs, after which the request is published again; above the broker's
            redelivery, as a running attempt shows with every heartbeat that it lives. A queued step is not silent, it
            waits: only the deadline bounds that.
        max_resubmissions: after these the deadline decides.
    """

    resubmit_after_s: float = 20.0
    max_resubmissions: int = 3


@dataclass(slots=True)
class RequestState:
    """State of one request. `deadline_s` and every `now_s` are monotonic seconds of the same clock."""

    plan: Plan
    deadline_s: float
    policy: StatePolicy
    last_move_s: float
    timeline: Timeline = field(default_factory=Timeline)
    choices: tuple[ChoiceStream, ...] = ()
    media: MediaStream = field(default_factory=MediaStream)
    pictures: PictureStream | None = None
    fences: dict[StepId, Fence] = field(default_factory=dict)
    running: set[StepId] = field(default_factory=set)
    log: AttemptLog = field(default_factory=AttemptLog)
    generation: int = 0
    num_resubmissions: int = 0
    num_resends: int = 0
    end: End | None = None
    ended_by: tuple[StepId, Fence] | None = None

    def __post_init__(self) -> None:
        params = self.terminal.params
        if isinstance(params, DiffusionParams):
            self.pictures = PictureStream(params.n)
            return
        num_choices = params.n if isinstance(params, DecodeParams) else 1
        self.choices = tuple(ChoiceStream(choice) for choice in range(num_choices))

    @property
    def terminal(self) -> PlanStep:
        """The step whose `Finished` ends the request."""
        return self.plan.steps[-1]

    def on_message(self, message: WorkerMessage, now_s: float, now_unix_s: float) -> list[Effect]:
        """A worker said something."""
        if isinstance(message, Started):
            self.timeline.started(message.attempt, now_unix_s)
        elif isinstance(message, StepDone):
            self.timeline.done(message)
        if self.end is not None:
            return self._after_end(message)
        attempt = message.attempt
        if attempt.fence < self.fences.get(attempt.step_id, (0, 0)):
            return self._outranked(message)
        self._raise_fence(attempt)
        self.last_move_s = now_s
        return self._accept(message, now_s)

    def _accept(self, message: WorkerMessage, now_s: float) -> list[Effect]:
        match message:
            case Token():
                return self._on_token(message)
            case Chunk() | Picture():
                return self._on_chunk(message) if isinstance(message, Chunk) else self._on_picture(message)
            case Started():
                self.running.add(message.attempt.step_id)
            case Progress():
                self.running.add(message.attempt.step_id)
                if self.pictures is not None:
                    self._note(message.attempt, message.seq)
                    return list(self.pictures.progress(message.done_ratio))
            case StepDone():
                self.running.discard(message.attempt.step_id)
            case Claim():
                return [Reply(ClaimReply(status="granted", choices=self._progress()))]
            case Finished():
                return self._on_finished(message)
            case Failed():
                return self._on_failed(message)
            case RootLost():
                return self._on_root_lost(message, now_s)
        if not isinstance(message, Claim | RootLost):
            self._note(message.attempt, message.seq)
        return []

    def on_tick(self, now_s: float) -> list[Effect]:
        """Time passed: the deadline, and silence while something runs."""
        if self.end is not None:
            return []
        if now_s >= self.deadline_s:
            return self._finish_with(End(failure=_DEADLINE), cancel="deadline")
        is_silent = bool(self.running) and now_s - self.last_move_s >= self.policy.resubmit_after_s
        if is_silent and self.num_resubmissions < self.policy.max_resubmissions:
            return [self._resubmit("silence", now_s)]
        return []

    def on_abandon(self, reason: str, failure: Failure | None = None) -> list[Effect]:
        """The client left (no failure), or this ingress gives the request up."""
        return [] if self.end is not None else self._finish_with(End(failure=failure), cancel=reason)

    def _after_end(self, message: WorkerMessage) -> list[Effect]:
        who = (message.attempt.step_id, message.attempt.fence)
        if isinstance(message, Finished | Failed) and who == self.ended_by:
            return [Reply(Confirm(status="accepted"))]
        return _refusal(message, "gone")

    def _outranked(self, message: WorkerMessage) -> list[Effect]:
        return _refusal(message, "stale", self.fences[message.attempt.step_id][0])

    def _raise_fence(self, attempt: Attempt) -> None:
        known = self.fences.get(attempt.step_id)
        if known == attempt.fence:
            return
        self.fences[attempt.step_id] = attempt.fence
        if attempt.step_id == self.terminal.step_id:
            self.log = AttemptLog()
            self.num_resends = 0
            self.media.forget_early()
            for choice in self.choices:
                choice.forget_early()

    def _on_token(self, message: Token) -> list[Effect]:
        if message.attempt.step_id != self.terminal.step_id or message.choice >= len(self.choices):
            return [Dropped("unexpected")]
        # A lost `Started` must not look like a step that does not run.
        self.running.add(message.attempt.step_id)
        self._note(message.attempt, message.seq)
        try:
            return list(self.choices[message.choice].offer(message))
        except StreamDivergedError:
            return self._finish_with(End(failure=_DIVERGED), cancel="stream_diverged")

    def _on_picture(self, message: Picture) -> list[Effect]:
        if self.pictures is None or message.attempt.step_id != self.terminal.step_id:
            return [Dropped("unexpected")]
        self.running.add(message.attempt.step_id)
        self._note(message.attempt, message.seq)
        return list(self.pictures.offer(message))

    def _on_chunk(self, message: Chunk) -> list[Effect]:
        if message.attempt.step_id != self.terminal.step_id:
            return [Dropped("unexpected")]
        self.running.add(message.attempt.step_id)
        self._note(message.attempt, message.seq)
        deltas = self.media.offer(message)
        return [Dropped("unexpected")] if deltas is None else list(deltas)

    def _progress(self) -> tuple[ChoiceProgress, ...]:
        """What the next attempt has to know; media are told with the first choice."""
        if not self.choices:
            return ()
        first, *others = (choice.progress() for choice in self.choices)
        return (msgspec.structs.replace(first, num_chunks=self.media.num_whole), *others)

    def _on_finished(self, message: Finished) -> list[Effect]:
        if message.attempt.step_id != self.terminal.step_id:
            return [Reply(Confirm(status="stale")), Dropped("unexpected")]
        has_all = self._has_all(message.num_tokens) and message.num_chunks <= self.media.num_whole
        if not self.log.is_whole_before(message.seq) or not has_all:
            return self._ask_again(message)
        missing_ends = [
            Delta(choice=choice.choice, text="", num_tokens=0, finish_reason="stop")
            for choice in self.choices
            if choice.finish_reason is None
        ]
        self.ended_by = (message.attempt.step_id, message.attempt.fence)
        return [*missing_ends, *self._finish_with(End(usage=message.usage)), Reply(Confirm(status="accepted"))]

    def _ask_again(self, message: Finished) -> list[Effect]:
        self.num_resends += 1
        if self.num_resends > MAX_RESENDS:
            self.ended_by = (message.attempt.step_id, message.attempt.fence)
            return [*self._finish_with(End(failure=_INCOMPLETE)), Reply(Confirm(status="accepted"))]
        # Numbers all there but tokens missing: what was lost is older than this log, so ask for everything.
        from_seq = 0 if self.log.is_whole_before(message.seq) else self.log.next_seq
        return [Reply(Confirm(status="resend", resend_from_seq=from_seq))]

    def _on_failed(self, message: Failed) -> list[Effect]:
        self.ended_by = (message.attempt.step_id, message.attempt.fence)
        has_branches = len(self.plan.steps) > 2 and message.attempt.step_id not in (
            self.plan.steps[0].step_id,
            self.terminal.step_id,
        )
        cancel = "failed_elsewhere" if has_branches else None
        return [*self._finish_with(End(failure=message.failure), cancel=cancel), Reply(Confirm(status="accepted"))]

    def _on_root_lost(self, message: RootLost, now_s: float) -> list[Effect]:
        accepted = Reply(Confirm(status="accepted"))
        if self._generation_of(message.attempt.step_id, message.attempt.epoch) < self.generation:
            return [accepted]
        if self.num_resubmissions >= self.policy.max_resubmissions:
            return [*self._finish_with(End(failure=_ROOT_LOST), cancel="root_lost"), accepted]
        return [self._resubmit("root_lost", now_s), accepted]

    def _resubmit(self, reason: str, now_s: float) -> Resubmit:
        """At an epoch above all that was heard of: repairs of repairs rise beyond the stride of their generation."""
        heard = [self._generation_of(step_id, epoch) for step_id, (epoch, _) in self.fences.items()]
        self.generation = max([self.generation, *heard]) + 1
        self.num_resubmissions += 1
        self.last_move_s = now_s
        self.running.clear()
        return Resubmit(epoch=self.generation * RESUBMIT_STRIDE, reason=reason)

    def _finish_with(self, end: End, *, cancel: str | None = None) -> list[Effect]:
        self.end = end
        self.running.clear()
        return [end] if cancel is None else [end, CancelWork(cancel)]

    def _note(self, attempt: Attempt, seq: int) -> None:
        if attempt.step_id == self.terminal.step_id:
            self.log.note(seq)

    def _has_all(self, num_tokens: tuple[int, ...]) -> bool:
        if self.pictures is not None:
            return self.pictures.is_whole
        # Workers leave out choices without tokens at the end.
        wanted = num_tokens + (0,) * (len(self.choices) - len(num_tokens))
        return not num_tokens or wanted == tuple(len(choice.token_ids) for choice in self.choices)

    def _generation_of(self, step_id: StepId, epoch: int) -> int:
        """Which resubmission an attempt descends from, or a later one: its epoch is at least the sum of its inputs'."""
        weights: dict[StepId, int] = {}
        for step in self.plan.steps:
            weights[step.step_id] = sum(weights.get(need, 0) for need in step.needs) or 1
        return epoch // (RESUBMIT_STRIDE * weights.get(step_id, 1))


def _refusal(message: WorkerMessage, status: str, fence_epoch: int | None = None) -> list[Effect]:
    """Answer to somebody who holds the stream no more; mere events are dropped."""
    if isinstance(message, Claim):
        return [Reply(ClaimReply(status=status, fence_epoch=fence_epoch))]
    if isinstance(message, Finished | Failed | RootLost):
        return [Reply(Confirm(status=status, fence_epoch=fence_epoch))]
    return [] if isinstance(message, StepDone | Started) else [Dropped(status)]


def _failure(code: str, message: str, status: int, retry_after_s: float | None = None) -> Failure:
    return Failure(error_type="server_error", code=code, message=message, status=status, retry_after_s=retry_after_s)


_DEADLINE = _failure("deadline_exceeded", "The request was not finished before its deadline.", 504, 1.0)
_DIVERGED = _failure("stream_diverged", "The answer could not be continued after a fault; ask again.", 500)
_INCOMPLETE = _failure("stream_incomplete", "Part of the answer was lost; ask again.", 500)
_ROOT_LOST = _failure("root_lost", "The request's input was lost repeatedly; ask again.", 503, 1.0)
