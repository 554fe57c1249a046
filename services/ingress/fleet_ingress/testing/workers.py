"""Scripted workers: preprocess, decode and audio; a vision worker is only registered, preprocess plays its part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fleet_common.bus.memory import MemoryBroker, MemoryBus
from fleet_common.bus.port import BusMessage, WorkMessage
from fleet_common.errors import BusError
from fleet_common.tensors.port import TensorStore
from fleet_contracts import codec, subjects
from fleet_contracts.base import Modality, PriorityClass, Stage, StepId, WorkerId
from fleet_contracts.control import ModelCard, PoolRoute, Route, RoutingTable, WorkerInfo
from fleet_contracts.decode import DecodeParams
from fleet_contracts.embed import EmbedParams
from fleet_contracts.events import (
    Attempt,
    ChoiceProgress,
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Finished,
    IngressReply,
    RequestEvent,
    Started,
    StepDone,
    Usage,
    WorkerMessage,
)
from fleet_contracts.preprocess import MediaItem, PreprocessParams
from fleet_contracts.tensors import MemoryPlace
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams
from fleet_contracts.work import StepOutput, StepParams, StepTask
from fleet_ingress.testing.script import FaultError, Script, first_index

TEXT_MODEL = "llm"
IMAGE_MODEL = "org/vlm-1.5"
LISTENING_MODEL = "listener"
SPEECH_MODEL = "asr"
VOICE_MODEL = "tts"
EMBEDDING_MODEL = "emb"

#: Width of the vectors of `EMBEDDING_MODEL`; vector i of an answer is i + 0, i + 1/8, ...
EMBEDDING_WIDTH = 8

CARDS = (
    ModelCard(model=TEXT_MODEL, context_tokens=4096),
    ModelCard(model=IMAGE_MODEL, input_modalities=(Modality.TEXT, Modality.IMAGE), context_tokens=4096, max_images=4),
    ModelCard(
        model=LISTENING_MODEL, input_modalities=(Modality.TEXT, Modality.AUDIO), context_tokens=4096, max_audios=2
    ),
    ModelCard(model=SPEECH_MODEL, input_modalities=(Modality.AUDIO,), languages=("en", "de")),
    ModelCard(model=VOICE_MODEL, output_modalities=(Modality.AUDIO,), voices=("heart", "alloy")),
    ModelCard(
        model=EMBEDDING_MODEL,
        output_modalities=(Modality.EMBEDDING,),
        context_tokens=256,
        hidden_size=EMBEDDING_WIDTH,
        embedding_dimensions=(2,),
    ),
)
TERMINAL_STAGES = (Stage.DECODE, Stage.AUDIO_TRANSCRIBE, Stage.AUDIO_SPEAK)
STAGES = (Stage.PREPROCESS, Stage.VISION_ENCODE, *TERMINAL_STAGES)

_Work = Callable[[MemoryBus, WorkMessage, StepTask], Coroutine[None, None, None]]


def pool_of(stage: Stage) -> str:
    """The one pool of a stage."""
    return f"{stage.value.replace('_', '-')}-pool"


@dataclass(slots=True)
class Speaker:
    """One attempt's voice: numbers events, keeps them, asks for the confirmation of the last."""

    fleet: ScriptedFleet
    bus: MemoryBus
    task: StepTask
    attempt: Attempt
    kept: list[RequestEvent] = field(default_factory=list)

    @property
    def subject(self) -> str:
        """Where the request's events go."""
        events = self.task.events
        return subjects.event(events.ingress_id, self.task.request_id, events.nonce)

    @property
    def next_seq(self) -> int:
        """Number of the next event."""
        return len(self.kept)

    async def say(self, event: RequestEvent) -> None:
        """Publish an event, unless the test wants it lost."""
        self.kept.append(event)
        if not self.fleet.lose(event):
            await self.bus.publish(self.subject, codec.encode(event))

    async def step_done(self, media: tuple[MediaItem, ...] = ()) -> None:
        """Report the step."""
        await self.say(
            StepDone(
                attempt=self.attempt,
                seq=self.next_seq,
                pool=pool_of(self.attempt.stage),
                queued_unix_s=self.task.enqueued_unix_s,
                started_unix_s=self.task.enqueued_unix_s,
                finished_unix_s=self.task.enqueued_unix_s,
                media=media,
            )
        )

    async def claim(self) -> tuple[ChoiceProgress, ...] | None:
        """Take the stream over; None when refused."""
        reply = await self._ask(Claim(attempt=self.attempt))
        return reply.choices if isinstance(reply, ClaimReply) and reply.status == "granted" else None

    async def confirm(self, event: Finished | Failed) -> str:
        """Ask until the end is confirmed; returns the status."""
        while True:
            reply = await self._ask(event)
            if not isinstance(reply, Confirm) or reply.status != "resend":
                return reply.status
            for kept in self.kept[reply.resend_from_seq :]:
                await self.bus.publish(self.subject, codec.encode(kept))

    async def _ask(self, message: WorkerMessage) -> IngressReply:
        payload = codec.encode(message)
        while True:
            try:
                return codec.decode_ingress_reply(await self.bus.request(self.subject, payload, timeout_s=2.0))
            except BusError:
                await asyncio.sleep(0.05)


@dataclass
class ScriptedFleet:
    """The workers.

    Attributes:
        script: chooses what to do from the client's body.
        bodies: every body preprocess saw, in order; `tasks`: every work item of preprocess.
        lose: events for which this is true never arrive.
        lose_answers: so many tensors that are answers are gone from the store before the ingress reads them.
        num_running: decode steps that run right now.
        cancelled: ids of requests whose cancellation was heard.
    """

    broker: MemoryBroker
    store: TensorStore
    script: Callable[[Mapping[str, object]], Script] = lambda body: Script()
    lose: Callable[[RequestEvent], bool] = lambda event: False
    lose_answers: int = 0
    bodies: list[dict[str, object]] = field(default_factory=list)
    tasks: list[StepTask] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    num_running: int = 0
    cancelled: set[str] = field(default_factory=set)
    _scripts: dict[str, Script] = field(default_factory=dict)
    _jobs: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Register, publish a routing table, and work while the block runs."""
        bus = self.broker.connect()
        for stage in STAGES:
            await self.register(stage)
        await self.publish_table(CARDS)
        await bus.subscribe(subjects.CANCEL, self._on_cancel)
        async with asyncio.TaskGroup() as group:
            terminal = ((stage, self._finish) for stage in TERMINAL_STAGES)
            for stage, work in ((Stage.PREPROCESS, self._preprocess), *terminal):
                for priority_class in PriorityClass:
                    pull = await bus.pull(stage, pool_of(stage), priority_class, "any", self._starter(group, bus, work))
                    pull.want(100_000)
            try:
                yield
            finally:
                await bus.close()
                for job in self._jobs:
                    job.cancel()

    async def register(
        self,
        stage: Stage,
        state: str = "ready",
        *,
        name: str = "0",
        accepted_tags: tuple[str, ...] = codec.ACCEPTED_TAGS,
    ) -> None:
        """Put a worker of a stage into the registry."""
        registry = await self.broker.connect().kv(subjects.BUCKET_REGISTRY)
        info = WorkerInfo(
            worker_id=WorkerId(f"{stage.value}-{name}"),
            stage=stage,
            pool=pool_of(stage),
            host="test",
            pid=1,
            state=state,
            slots=8,
            locality="memory",
            accepted_tags=accepted_tags,
        )
        await registry.put(f"worker.{stage.value}.{info.worker_id}", codec.encode(info), ttl_s=3600)

    async def unregister(self, stage: Stage) -> None:
        """The worker of a stage is gone."""
        registry = await self.broker.connect().kv(subjects.BUCKET_REGISTRY)
        await registry.delete(f"worker.{stage.value}.{stage.value}-0")

    async def publish_table(self, cards: tuple[ModelCard, ...]) -> None:
        """Publish a routing table that serves `cards`."""
        routing = await self.broker.connect().kv(subjects.BUCKET_ROUTING)
        routes = tuple(
            Route(
                stage=stage,
                model=card.model,
                pools=(PoolRoute(pool=pool_of(stage), weight_ratio=1.0, locality="memory"),),
            )
            for card in cards
            for stage in STAGES
        )
        table = RoutingTable(revision=1, made_unix_s=0.0, policy="static", routes=routes, models=cards)
        await routing.put(subjects.ROUTING_KEY, codec.encode(table))

    def _starter(self, group: asyncio.TaskGroup, bus: MemoryBus, work: _Work) -> Callable[[WorkMessage], None]:
        async def isolated(message: WorkMessage) -> None:
            try:
                await work(bus, message, codec.decode_task(message.payload))
            except FaultError:
                return

        def start(message: WorkMessage) -> None:
            job = group.create_task(isolated(message))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

        return start

    async def _on_cancel(self, message: BusMessage) -> None:
        self.cancelled.add(codec.decode_cancel(message.payload).request_id)

    def _speaker(self, bus: MemoryBus, task: StepTask, delivery: int, step_id: StepId | None = None) -> Speaker:
        step = task.plan.step(step_id or task.step_id)
        attempt = Attempt(
            request_id=task.request_id,
            step_id=step.step_id,
            stage=step.stage,
            worker_id=WorkerId(f"{step.stage.value}-0"),
            epoch=task.epoch,
            delivery=delivery,
        )
        return Speaker(self, bus, task, attempt)

    async def _preprocess(self, bus: MemoryBus, message: WorkMessage, task: StepTask) -> None:
        script = await self._begin(task)
        speaker = self._speaker(bus, task, message.delivery)
        await speaker.say(Started(attempt=speaker.attempt, seq=0))
        if script.refuse is not None:
            self.statuses.append(
                await speaker.confirm(Failed(attempt=speaker.attempt, seq=speaker.next_seq, failure=script.refuse))
            )
        elif len(task.plan.steps) == 1:
            await speaker.step_done()
            usage = Usage(prompt_tokens=script.num_prompt_tokens, completion_tokens=0)
            finished = Finished(attempt=speaker.attempt, seq=speaker.next_seq, usage=usage)
            self.statuses.append(await speaker.confirm(finished))
        else:
            await speaker.step_done()
            await self._play_vision(bus, task)
            await self._publish_last(bus, task)
        await message.ack()

    async def _begin(self, task: StepTask) -> Script:
        """The script for what the first step finds in the root: a JSON body, or a file (`{"file": bytes}`)."""
        self.tasks.append(task)
        assert task.root is not None
        with await self.store.get(task.root) as lease:
            root = lease.array.tobytes()
        params = task.step.params
        is_body = isinstance(params, PreprocessParams) and params.route != "audio"
        body = json.loads(root) if is_body else {"file": root}
        self.bodies.append(body)
        script = self._scripts[task.request_id] = self.script(body)
        return script

    async def _play_vision(self, bus: MemoryBus, task: StepTask) -> None:
        for number, step in enumerate(task.plan.steps[1:-1]):
            speaker = self._speaker(bus, task, 1, step.step_id)
            await speaker.say(Started(attempt=speaker.attempt, seq=0))
            await speaker.step_done((_medium(number, step.params),))

    async def _publish_last(self, bus: MemoryBus, task: StepTask) -> None:
        *done, last = task.plan.steps
        decode = msgspec.structs.replace(
            task,
            step_id=last.step_id,
            inputs={step.step_id: StepOutput(step_id=step.step_id, epoch=task.epoch) for step in done},
        )
        await bus.publish_work(
            subjects.work(last.stage, pool_of(last.stage), task.priority_class),
            codec.encode(decode),
            message_id=subjects.message_id(task.request_id, decode.step_id, decode.epoch),
            ttl_s=600,
        )

    async def _finish(self, bus: MemoryBus, message: WorkMessage, task: StepTask) -> None:
        speaker = self._speaker(bus, task, message.delivery)
        if task.request_id not in self._scripts:
            await self._begin(task)
        self.num_running += 1
        try:
            known = await speaker.claim() if message.delivery > 1 or task.epoch > 0 else ()
            script = self._scripts[task.request_id]
            if isinstance(task.step.params, EmbedParams):
                await self._embed(speaker, task.step.params)
            elif known is not None and isinstance(task.step.params, DecodeParams):
                await self._speak(speaker, script, known)
            elif known is not None:
                await self._send_media(speaker, script, known)
            await message.ack()
        finally:
            self.num_running -= 1

    async def _embed(self, speaker: Speaker, params: EmbedParams) -> None:
        await speaker.say(Started(attempt=speaker.attempt, seq=0))
        script = self._scripts[speaker.attempt.request_id]
        width = params.dimensions or EMBEDDING_WIDTH
        rows = np.arange(script.num_inputs, dtype=np.float32)[:, None] + np.arange(width, dtype=np.float32) / 8
        ref = await self.store.put(rows, ttl_s=600)
        if self.lose_answers > 0:
            self.lose_answers -= 1
            ref = msgspec.structs.replace(ref, place=MemoryPlace(key="gone"))
        await speaker.step_done()
        usage = Usage(prompt_tokens=script.num_prompt_tokens, completion_tokens=0)
        finished = Finished(attempt=speaker.attempt, seq=speaker.next_seq, usage=usage, outputs={"vectors": ref})
        self.statuses.append(await speaker.confirm(finished))

    async def _speak(self, speaker: Speaker, script: Script, known: tuple[ChoiceProgress, ...]) -> None:
        params = speaker.task.step.params
        assert isinstance(params, DecodeParams)
        attempt = speaker.attempt
        await speaker.say(Started(attempt=attempt, seq=0))
        for index in range(len(script.pieces)):
            if attempt.request_id in self.cancelled:
                return
            if script.before_token is not None:
                await script.before_token(index)
            if script.fail is not None and index == script.fail_at:
                failed = Failed(attempt=attempt, seq=speaker.next_seq, failure=script.fail)
                self.statuses.append(await speaker.confirm(failed))
                return
            for choice in range(params.n):
                if not known or index >= first_index(known[choice]):
                    await speaker.say(script.token(attempt, speaker.next_seq, choice, index))
        await speaker.step_done()
        num_tokens = len(script.pieces)
        usage = Usage(prompt_tokens=script.num_prompt_tokens, completion_tokens=num_tokens * params.n)
        finished = Finished(attempt=attempt, seq=speaker.next_seq, usage=usage, num_tokens=(num_tokens,) * params.n)
        self.statuses.append(await speaker.confirm(finished))

    async def _send_media(self, speaker: Speaker, script: Script, known: tuple[ChoiceProgress, ...]) -> None:
        attempt = speaker.attempt
        await speaker.say(Started(attempt=attempt, seq=0))
        for index in range(known[0].num_chunks if known else 0, len(script.media)):
            if attempt.request_id in self.cancelled:
                return
            if script.before_token is not None:
                await script.before_token(index)
            if script.fail is not None and index == script.fail_at:
                failed = Failed(attempt=attempt, seq=speaker.next_seq, failure=script.fail)
                self.statuses.append(await speaker.confirm(failed))
                return
            for chunk in script.chunks(attempt, speaker.next_seq, index):
                await speaker.say(chunk)
        await speaker.step_done()
        usage = Usage(prompt_tokens=0, completion_tokens=0)
        finished = Finished(attempt=attempt, seq=speaker.next_seq, usage=usage, num_chunks=len(script.media))
        self.statuses.append(await speaker.confirm(finished))


def _medium(number: int, params: StepParams) -> MediaItem:
    if isinstance(params, AudioEncodeParams):
        sound = MediaItem(part="", kind="audio", width=0, height=0, mode="mono", sha256="cd", num_tokens=25)
        return msgspec.structs.replace(sound, part=f"audio{number}", duration_s=1.0, sample_rate_hz=48_000)
    seen = MediaItem(part="", kind="image", width=4, height=2, mode="RGB", sha256="ab", num_tokens=64)
    if isinstance(params, VideoEncodeParams):
        return msgspec.structs.replace(seen, part=f"video{number}", kind="video", grid=(3, 4, 4), duration_s=1.5)
    return msgspec.structs.replace(seen, part=f"image{number}")
