"""An ingress for tests of workers: submits tasks, keeps what it hears by the protocol's rules, answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from fleet_common.bus.port import Bus, BusMessage, Subscription
from fleet_contracts import codec, subjects
from fleet_contracts.base import IngressId
from fleet_contracts.control import IngressInfo
from fleet_contracts.events import (
    ChoiceProgress,
    Chunk,
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Finished,
    Picture,
    Progress,
    RequestEvent,
    RootLost,
    Started,
    StepDone,
    Token,
)
from fleet_contracts.work import RESUBMIT_STRIDE, StepTask


@dataclass(slots=True)
class StepView:
    """What is known of one step: the fence, the next sequence number, whether some are missing."""

    fence: tuple[int, int] = (-1, 0)
    next_seq: int = 0


@dataclass(slots=True)
class RequestView:
    """Everything heard of one request.

    Attributes:
        tokens: ids of choice 0; texts: their text.
        pictures: the first of each choice and index.
        chunks: whole media, in order; pieces: of the one that is not whole.
        terminal: every terminal event that was accepted: exactly one in a healthy fleet.
        outranked: events dropped by the fence.
    """

    steps: dict[str, StepView] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    pictures: dict[tuple[int, int], Picture] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    terminal: list[Finished | Failed] = field(default_factory=list)
    done: list[StepDone] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    outranked: list[RequestEvent] = field(default_factory=list)
    num_resends: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeIngress:
    """One ingress on a bus.

    Attributes:
        lose: events for which this is true are dropped as if the network had lost them.
        ignore_terminal: how many terminal events to leave unanswered.
    """

    def __init__(self, bus: Bus, ingress_id: str = "ing0") -> None:
        self.ingress_id = IngressId(ingress_id)
        self.requests: dict[str, RequestView] = {}
        self.root_lost: list[RootLost] = []
        self.lose: Callable[[RequestEvent], bool] = lambda event: False
        self.ignore_terminal = 0
        self._bus = bus
        self._submitted: dict[str, StepTask] = {}
        self._subscription: Subscription | None = None

    async def start(self, *, lease_s: float = 3600.0) -> None:
        """Register and listen."""
        registry = await self._bus.kv(subjects.BUCKET_REGISTRY)
        info = IngressInfo(ingress_id=self.ingress_id, host="test", pid=1, url="http://127.0.0.1")
        await registry.put(f"ingress.{self.ingress_id}", codec.encode(info), lease_s)
        self._subscription = await self._bus.subscribe(subjects.events_of(self.ingress_id), self._heard)

    async def stop(self) -> None:
        """Listen no longer."""
        if self._subscription is not None:
            await self._subscription.stop()

    async def submit(self, task: StepTask, pool: str) -> None:
        """Publish the first step of a request."""
        self._submitted[task.request_id] = task
        self.requests.setdefault(task.request_id, RequestView())
        subject = subjects.work(task.step.stage, pool, task.priority_class, task.lane)
        message_id = subjects.message_id(task.request_id, task.step_id, task.epoch)
        await self._bus.publish_work(subject, codec.encode(task), message_id=message_id, ttl_s=600.0)

    def view(self, request_id: str) -> RequestView:
        """What was heard of a request."""
        return self.requests.setdefault(request_id, RequestView())

    async def _heard(self, message: BusMessage) -> None:
        event = codec.decode_worker_message(message.payload)
        request = self.view(event.attempt.request_id)
        step = request.steps.setdefault(event.attempt.step_id, StepView())
        if isinstance(event, RootLost):
            self.root_lost.append(event)
            await self._answer(message, Confirm(status="accepted"))
            return
        if isinstance(event, Claim):
            await self._answer(message, self._claim(request, step, event))
            return
        if self.lose(event):
            return
        if event.attempt.fence < step.fence or request.terminal:
            request.outranked.append(event)
            if isinstance(event, Finished | Failed):
                status = "gone" if request.terminal else "stale"
                await self._answer(message, Confirm(status=status, fence_epoch=step.fence[0]))
            return
        self._raise_fence(step, event.attempt.fence)
        if isinstance(event, Finished | Failed):
            await self._end(message, request, step, event)
        elif event.seq == step.next_seq:
            step.next_seq += 1
            self._keep(request, event)

    def _raise_fence(self, step: StepView, fence: tuple[int, int]) -> None:
        if fence > step.fence:
            step.fence = fence
            step.next_seq = 0

    def _claim(self, request: RequestView, step: StepView, claim: Claim) -> ClaimReply:
        request.claims.append(claim)
        if request.terminal:
            return ClaimReply(status="gone")
        if claim.attempt.fence < step.fence:
            return ClaimReply(status="stale", fence_epoch=step.fence[0])
        self._raise_fence(step, claim.attempt.fence)
        request.pieces.clear()
        text = "".join(request.texts)
        progress = ChoiceProgress(
            token_ids=tuple(request.tokens), num_text_chars=len(text), num_chunks=len(request.chunks)
        )
        return ClaimReply(status="granted", choices=(progress,) if request.tokens or request.chunks else ())

    def _keep(self, request: RequestView, event: Started | Token | Progress | Chunk | Picture | StepDone) -> None:
        if isinstance(event, StepDone):
            request.done.append(event)
        if isinstance(event, Picture):
            request.pictures.setdefault((event.choice, event.index), event)
        if isinstance(event, Chunk):
            if (event.index, event.piece) != (len(request.chunks), len(request.pieces)):
                raise AssertionError(f"a seam in the media at {event.index}.{event.piece}")
            request.pieces.append(event.data)
            if len(request.pieces) == event.num_pieces:
                request.chunks.append(b"".join(request.pieces))
                request.pieces.clear()
        if isinstance(event, Token):
            if event.index != len(request.tokens) or event.text_offset != len("".join(request.texts)):
                raise AssertionError(f"a seam in the stream at {event.index}")
            request.tokens.extend(event.token_ids)
            request.texts.append(event.text)

    async def _end(self, message: BusMessage, request: RequestView, step: StepView, event: Finished | Failed) -> None:
        if self.ignore_terminal > 0:
            self.ignore_terminal -= 1
            return
        if event.seq != step.next_seq:
            request.num_resends += 1
            await self._answer(message, Confirm(status="resend", resend_from_seq=step.next_seq))
            return
        request.terminal.append(event)
        request.ended.set()
        await self._answer(message, Confirm(status="accepted"))

    async def _answer(self, message: BusMessage, reply: Confirm | ClaimReply) -> None:
        await self._bus.respond(message, codec.encode(reply))


def resubmitted(task: StepTask) -> StepTask:
    """The first step again, as an ingress publishes it when nothing moves."""
    return msgspec.structs.replace(task, epoch=task.epoch + RESUBMIT_STRIDE)
