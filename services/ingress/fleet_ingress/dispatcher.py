"""The ingress's side of the bus: starts requests, hears their events, applies what the state machines decide."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import structlog

from fleet_common.bus.port import BusMessage
from fleet_common.errors import BusError, FleetError, NoResponderError, TensorNotFoundError
from fleet_common.ids import ingress_of, new_nonce, new_request_id
from fleet_common.telemetry.tracing import carrier
from fleet_contracts import codec, subjects
from fleet_contracts.base import IngressId, RequestId
from fleet_contracts.events import (
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Failure,
    Finished,
    IngressReply,
    Picture,
    RootLost,
    TimelineQuery,
    TimelineReply,
    WorkerMessage,
)
from fleet_contracts.work import EventAddress, StepTask
from fleet_ingress.core.image_answers import ShownPicture
from fleet_ingress.core.media_stream import MediaDelta
from fleet_ingress.core.parsed import ParsedRequest
from fleet_ingress.core.picture_stream import PictureMade, ProgressMade
from fleet_ingress.core.plan import make_plan
from fleet_ingress.core.request_state import (
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
from fleet_ingress.jobs.origin import class_and_timeout
from fleet_ingress.live import LiveRequest
from fleet_ingress.publisher import Fleet, Publisher
from fleet_ingress.settings import IngressSettings

log = structlog.get_logger(__name__)

_TICK_S = 0.25
_ASK_TIMEOUT_S = 2.0
_MAX_SEED = 2**31


class Dispatcher:
    """All requests of one ingress. `live` by request id until the end, `ended` for late questions after it."""

    def __init__(self, ingress_id: IngressId, fleet: Fleet, settings: IngressSettings) -> None:
        self.ingress_id = ingress_id
        self.live: dict[RequestId, LiveRequest] = {}
        self.ended: OrderedDict[RequestId, LiveRequest] = OrderedDict()
        self._fleet = fleet
        self._settings = settings
        self._publisher = Publisher(fleet)
        self._policy = StatePolicy(
            resubmit_after_s=settings.resubmit_after_s, max_resubmissions=settings.max_resubmissions
        )
        self._group: asyncio.TaskGroup | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the broker is in reach right now."""
        return self._fleet.bus.is_connected

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Subscribe and tick while the block runs; unfinished requests are given up at its end. Raises BusError."""
        await self._publisher.start()
        bus = self._fleet.bus
        events = await bus.subscribe(subjects.events_of(self.ingress_id), self._on_event)
        questions = await bus.subscribe(subjects.ask(self.ingress_id), self._on_question)
        async with asyncio.TaskGroup() as self._group:
            ticks = self._group.create_task(self._tick_for_ever())
            try:
                yield
            finally:
                self.abandon_all("ingress_stopped")
                ticks.cancel()
                await events.stop()
                await questions.stop()

    async def submit(self, parsed: ParsedRequest, body: bytes, tenant: str, timeout_s: float) -> LiveRequest:
        """Accept a request: from here on it ends exactly once.

        Raises:
            StageUnavailableError, AdmissionRejectedError, StoreError, BusError: refused, nothing runs.
        """
        live = self._new_live(parsed, body, tenant, timeout_s)
        self._publisher.check_reachable(live.task.plan)
        self.live[live.request_id] = live
        try:
            published = await self._publisher.publish_first(live.task, body, self._settings.publish_timeout_s)
        except BaseException:
            self.live.pop(live.request_id, None)
            raise
        self._keep_root(live, published)
        return live

    def abandon(self, live: LiveRequest, reason: str, failure: Failure | None = None) -> None:
        """The client left (no failure), or this ingress gives the request up; the fleet is told to stop."""
        self._apply(live, live.state.on_abandon(reason, failure))

    def abandon_all(self, reason: str) -> None:
        """Give up every request, with an error for its client."""
        failure = Failure(
            error_type="server_error", code=reason, message="The server is stopping.", status=503, retry_after_s=1.0
        )
        for live in list(self.live.values()):
            self.abandon(live, reason, failure)

    async def report(self, request_id: str, tenant: str) -> bytes:
        """Timeline of a request of this or another ingress as JSON; b"" when unknown or not this tenant's."""
        owner = ingress_of(request_id)
        if owner is None:
            return b""
        if owner == self.ingress_id:
            return self._own_report(request_id, tenant)
        query = codec.encode(TimelineQuery(request_id=RequestId(request_id), tenant=tenant))
        try:
            answer = await self._fleet.bus.request(subjects.ask(owner), query, timeout_s=_ASK_TIMEOUT_S)
        except (NoResponderError, ValueError):
            # ValueError: the id names no possible ingress.
            return b""
        return codec.decode_timeline_reply(answer).body

    def _own_report(self, request_id: str, tenant: str) -> bytes:
        key = RequestId(request_id)
        live = self.live.get(key) or self.ended.get(key)
        return live.report() if live is not None and live.tenant == tenant else b""

    def _new_live(self, parsed: ParsedRequest, body: bytes, tenant: str, timeout_s: float) -> LiveRequest:
        clock = self._fleet.clock
        now_s, now_unix_s = clock.monotonic_s(), clock.unix_s()
        request_id, nonce = new_request_id(self.ingress_id), new_nonce()
        plan = make_plan(parsed, seed=int(nonce, 16) % _MAX_SEED)
        priority_class, timeout_s = class_and_timeout(parsed.priority_class, timeout_s)
        task = StepTask(
            request_id=request_id,
            step_id=plan.steps[0].step_id,
            epoch=0,
            plan=plan,
            model=parsed.served_model,
            priority_class=priority_class,
            tenant=tenant,
            deadline_unix_s=now_unix_s + timeout_s,
            enqueued_unix_s=now_unix_s,
            events=EventAddress(ingress_id=self.ingress_id, nonce=nonce),
            trace=carrier(),
        )
        state = RequestState(plan=plan, deadline_s=now_s + timeout_s, policy=self._policy, last_move_s=now_s)
        return LiveRequest(
            request_id=request_id,
            tenant=tenant,
            parsed=parsed,
            body=body,
            state=state,
            created_unix_s=now_unix_s,
            task=task,
        )

    async def _on_event(self, message: BusMessage) -> None:
        _, _, _, request, nonce = message.subject.split(".")
        request_id = RequestId(request)
        try:
            event = codec.decode_worker_message(message.payload)
        except codec.DecodeError:
            self._fleet.metrics.events_dropped_total.labels("undecodable").inc()
            return
        live = self.live.get(request_id) or self.ended.get(request_id)
        if live is None:
            await self._answer(message, _gone(event))
            return
        if nonce != live.nonce or event.attempt.request_id != request_id:
            self._fleet.metrics.events_dropped_total.labels("foreign").inc()
            return
        if live.state.pictures is not None and isinstance(event, Picture | Finished):
            self._spawn(self._handle_picture(message, live, event))
        elif isinstance(event, Finished) and event.outputs and live.state.end is None:
            self._spawn(self._take_outputs(message, live, event))
        else:
            await self._handle(message, live, event)

    async def _handle_picture(self, message: BusMessage, live: LiveRequest, event: Picture | Finished) -> None:
        """Files first: a picture has arrived once its file is here, and the end once all of them are."""
        if isinstance(event, Picture):
            is_wanted = live.state.end is None
            deadline_unix_s = live.task.deadline_unix_s
            if is_wanted and await live.files.fetch(event, lambda ref: self._publisher.read_file(ref, deadline_unix_s)):
                await self._handle(message, live, event)
            await self._publisher.release([event.file])
            return
        await live.files.all_read()
        lost = live.files.has_lost(event.attempt)
        await self._handle(message, live, RootLost(attempt=event.attempt) if lost else event)

    async def _take_outputs(self, message: BusMessage, live: LiveRequest, event: Finished) -> None:
        """Read the answer's tensors before the end is confirmed: until then the worker can be asked again.

        Raises StoreError: out of reach; no answer, so the worker asks again.
        """
        found: WorkerMessage = event
        try:
            outputs = {name: await self._publisher.read(ref) for name, ref in event.outputs.items()}
        except TensorNotFoundError:
            if live.state.end is None:
                log.warning("answer_lost", request_id=live.request_id)
                found = RootLost(attempt=event.attempt)
        else:
            live.outputs = live.outputs or outputs
        await self._handle(message, live, found)
        if live.state.end is not None:
            await self._publisher.release(list(event.outputs.values()))

    async def _handle(self, message: BusMessage, live: LiveRequest, event: WorkerMessage) -> None:
        clock = self._fleet.clock
        effects = live.state.on_message(event, clock.monotonic_s(), clock.unix_s())
        self._apply(live, effects)
        for effect in effects:
            if isinstance(effect, Reply):
                await self._answer(message, effect.message)

    def _apply(self, live: LiveRequest, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Delta():
                    self._note_first(live)
                    live.put(effect)
                case PictureMade(picture=picture):
                    self._note_first(live)
                    live.put_picture(
                        ShownPicture(
                            choice=picture.choice,
                            index=picture.index,
                            is_final=picture.is_final,
                            file=live.files.take(picture),
                        )
                    )
                case ProgressMade():
                    live.put_picture(effect)
                case MediaDelta():
                    self._note_first(live)
                    live.put_medium(effect)
                case End():
                    self._end(live, effect)
                case Resubmit():
                    self._fleet.metrics.resubmitted_total.labels(effect.reason).inc()
                    log.warning("request_resubmitted", request_id=live.request_id, reason=effect.reason)
                    self._spawn(self._resubmit(live, effect.epoch))
                case CancelWork():
                    self._spawn(self._publisher.cancel(live.request_id, effect.reason, live.task.deadline_unix_s))
                case Dropped():
                    self._fleet.metrics.events_dropped_total.labels(effect.reason).inc()

    def _note_first(self, live: LiveRequest) -> None:
        if live.first_token_unix_s is None:
            live.first_token_unix_s = self._fleet.clock.unix_s()

    def _end(self, live: LiveRequest, end: End) -> None:
        live.ended_unix_s = self._fleet.clock.unix_s()
        live.finish(end)
        if self.live.pop(live.request_id, None) is not None:
            self.ended[live.request_id] = live
        while len(self.ended) > self._settings.max_reports:
            self.ended.popitem(last=False)
        self._spawn(self._publisher.release(live.roots))

    async def _resubmit(self, live: LiveRequest, epoch: int) -> None:
        published = await self._publisher.publish_again(live.task, live.body, epoch)
        if published is not None:
            self._keep_root(live, published)

    def _keep_root(self, live: LiveRequest, published: StepTask) -> None:
        assert published.root is not None
        live.roots.append(published.root)
        # The end may have come while the publish was on its way.
        if live.state.end is not None:
            self._spawn(self._publisher.release([published.root]))

    async def _answer(self, message: BusMessage, reply: IngressReply | None) -> None:
        if message.reply is None or reply is None:
            return
        try:
            await self._fleet.bus.respond(message, codec.encode(reply))
        except BusError as err:
            # The worker asks again: an answer is never lost for good.
            log.debug("reply_not_sent", code=err.code)

    async def _on_question(self, message: BusMessage) -> None:
        try:
            query = codec.decode_timeline_query(message.payload)
        except codec.DecodeError:
            self._fleet.metrics.events_dropped_total.labels("undecodable").inc()
            return
        reply = TimelineReply(body=self._own_report(query.request_id, query.tenant))
        try:
            await self._fleet.bus.respond(message, codec.encode(reply))
        except BusError as err:
            log.debug("reply_not_sent", code=err.code)

    async def _tick_for_ever(self) -> None:
        while True:
            await self._fleet.clock.sleep(_TICK_S)
            self.tick()

    def tick(self) -> None:
        """Let time pass for every request; forget old reports."""
        now_s, now_unix_s = self._fleet.clock.monotonic_s(), self._fleet.clock.unix_s()
        for live in list(self.live.values()):
            self._apply(live, live.state.on_tick(now_s))
        while self.ended:
            oldest = next(iter(self.ended.values()))
            if (oldest.ended_unix_s or 0.0) + self._settings.report_ttl_s > now_unix_s:
                break
            self.ended.popitem(last=False)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._group is not None
        self._group.create_task(_logged(work))


def _gone(event: WorkerMessage) -> IngressReply | None:
    """Answer about a request this ingress does not know (any more)."""
    if isinstance(event, Claim):
        return ClaimReply(status="gone")
    return Confirm(status="gone") if isinstance(event, Finished | Failed | RootLost) else None


async def _logged(work: Coroutine[None, None, None]) -> None:
    """Background work must not take the ingress down with it."""
    try:
        await work
    except FleetError as err:
        log.error("background_work_failed", code=err.code, exc_info=err)
