"""Both stages over scripted models and the common runner: streams, continuation, refusals."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from fleet_audio.app import build_engine
from fleet_audio.core.pcm import pcm16
from fleet_audio.engine.scripted import ScriptedSpeaker, ScriptedTranscriber
from fleet_audio.settings import AudioSettings
from fleet_audio.worker import SpeakEngine, TranscribeEngine
from fleet_common.errors import EngineDeadError
from fleet_common.stage.port import Product
from fleet_common.testing.clock import settle
from fleet_common.testing.engines import ScriptedBatchEngine
from fleet_common.testing.plans import MODEL, chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts import codec
from fleet_contracts.audio import SpeakParams, TranscribeParams, TranscriptHead, TranscriptSegment
from fleet_contracts.base import Modality, Stage, StepId
from fleet_contracts.events import MAX_CHUNK_BYTES, Chunk, Failed, Finished, RequestEvent
from fleet_contracts.preprocess import PreprocessParams
from fleet_contracts.work import Plan, PlanStep, StepTask

TEXT = "The first one. Then a second. At last a third."
SENTENCES = ("The first one.", "Then a second.", "At last a third.")

#: The rig's clock is driven by hand, the engines' threads are not.
_PATIENCE_S = 5.0


def speak_engine(slots: int = 2, **engine_args: Any) -> SpeakEngine:
    return SpeakEngine(
        "tts",
        ScriptedSpeaker(engine_args),
        slots=slots,
        max_text_chars=500,
        sentence_chars=100,
        voice_aliases={"alloy": "", "robin": "second", "nobody": "absent"},
    )


def transcribe_engine(slots: int = 2, **engine_args: Any) -> TranscribeEngine:
    return TranscribeEngine("asr", ScriptedTranscriber(engine_args), slots=slots)


def said(*texts: str, **engine_args: Any) -> list[bytes]:
    speaker = ScriptedSpeaker(engine_args)
    return [pcm16(speaker.synthesize(text, "tone", 1.0)) for text in texts]


async def speak_task(rig: Rig, text: str = TEXT, **params: Any) -> StepTask:
    root = await rig.store.put(np.frombuffer(text.encode(), np.uint8), ttl_s=600.0, locality="memory")
    step = PlanStep(step_id=StepId("speak"), stage=Stage.AUDIO_SPEAK, model=MODEL, params=SpeakParams(**params))
    return chat_task(now_unix_s=rig.clock.unix_s(), root=root, plan=Plan(steps=(step,)))


async def ended(rig: Rig, task: StepTask) -> Finished | Failed:
    """Let threads and the rig's clock go on until the request is over."""
    view = rig.ingress.view(task.request_id)
    async with asyncio.timeout(_PATIENCE_S):
        while not view.terminal:
            await asyncio.sleep(0.005)
            await rig.clock.advance(0.05)
    (event,) = view.terminal
    return event


async def until_chunks(rig: Rig, task: StepTask, count: int) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while len(rig.ingress.view(task.request_id).chunks) < count:
            await asyncio.sleep(0.005)
            await settle()


class HeldSpeaker(ScriptedSpeaker):
    """Waits before a sentence until it is let go."""

    def __init__(self, at: str) -> None:
        super().__init__({})
        self.at = at
        self.go = threading.Event()

    def synthesize(self, text: str, voice: str, speed: float) -> npt.NDArray[np.float32]:
        if text == self.at:
            self.go.wait(_PATIENCE_S)
        return super().synthesize(text, voice, speed)


def held_engine(speaker: ScriptedSpeaker) -> SpeakEngine:
    return SpeakEngine("tts", speaker, slots=2, max_text_chars=500, sentence_chars=100, voice_aliases={})


async def started(rig: Rig, stage: Stage, engine: SpeakEngine | TranscribeEngine, worker_id: str = "w0") -> None:
    await engine.start()
    await rig.worker(stage, engine, worker_id=worker_id)


async def test_speech_is_one_medium_per_sentence_in_their_order(rig: Rig) -> None:
    await started(rig, Stage.AUDIO_SPEAK, speak_engine())
    task = await speak_task(rig)
    await rig.submit(task)

    end = await ended(rig, task)

    assert isinstance(end, Finished)
    assert end.num_chunks == 3
    assert rig.ingress.view(task.request_id).chunks == said(*SENTENCES)


async def test_speech_starts_before_the_text_ends_and_tells_what_is_last(rig: Rig) -> None:
    heard: list[RequestEvent] = []
    rig.ingress.lose = lambda event: bool(heard.append(event))
    speaker = HeldSpeaker(SENTENCES[1])
    await started(rig, Stage.AUDIO_SPEAK, held_engine(speaker))
    task = await speak_task(rig)
    await rig.submit(task)

    await until_chunks(rig, task, 1)
    num_early = len(rig.ingress.view(task.request_id).chunks)
    speaker.go.set()
    await ended(rig, task)

    assert num_early == 1
    assert [event.is_last for event in heard if isinstance(event, Chunk)] == [False, False, True]


async def test_a_large_medium_travels_in_small_messages(rig: Rig) -> None:
    heard: list[RequestEvent] = []
    rig.ingress.lose = lambda event: bool(heard.append(event))
    await started(rig, Stage.AUDIO_SPEAK, speak_engine())
    long = "word " * 18
    task = await speak_task(rig, long, speed=0.25)
    await rig.submit(task)

    await ended(rig, task)

    pieces = [event for event in heard if isinstance(event, Chunk)]
    assert len(pieces) > 1
    assert max(len(piece.data) for piece in pieces) <= MAX_CHUNK_BYTES
    assert max(len(codec.encode(piece)) for piece in pieces) <= 64 * 1024
    assert len(rig.ingress.view(task.request_id).chunks) == 1


@pytest.mark.parametrize("num_said", [1, 2])
async def test_a_killed_speaker_is_continued_with_the_next_sentence(rig: Rig, num_said: int) -> None:
    speaker = HeldSpeaker(SENTENCES[num_said])
    engine = held_engine(speaker)
    await engine.start()
    first = await rig.worker(Stage.AUDIO_SPEAK, engine)
    task = await speak_task(rig)
    await rig.submit(task)
    await until_chunks(rig, task, num_said)
    await first.kill()
    speaker.go.set()
    await started(rig, Stage.AUDIO_SPEAK, speak_engine(), "w1")

    await rig.clock.advance(rig.settings.ack_wait_s + 1.0)
    end = await ended(rig, task)

    view = rig.ingress.view(task.request_id)
    assert isinstance(end, Finished)
    assert view.chunks == said(*SENTENCES)
    assert [claim.attempt.delivery for claim in view.claims] == [2]
    assert end.num_chunks == 3


async def test_a_piece_that_got_lost_is_sent_again(rig: Rig) -> None:
    lost: list[RequestEvent] = []

    def lose(event: RequestEvent) -> bool:
        is_lost = isinstance(event, Chunk) and event.index == 1 and not lost
        if is_lost:
            lost.append(event)
        return is_lost

    rig.ingress.lose = lose
    await started(rig, Stage.AUDIO_SPEAK, speak_engine())
    task = await speak_task(rig)
    await rig.submit(task)

    await ended(rig, task)

    view = rig.ingress.view(task.request_id)
    assert (len(lost), view.num_resends) == (1, 1)
    assert view.chunks == said(*SENTENCES)


async def test_requests_take_turns_sentence_by_sentence(rig: Rig) -> None:
    speaker = HeldSpeaker(SENTENCES[0])
    await started(rig, Stage.AUDIO_SPEAK, held_engine(speaker))
    long = await speak_task(rig, " ".join(SENTENCES))
    short = await speak_task(rig, "Hello.")
    heard: list[RequestEvent] = []
    rig.ingress.lose = lambda event: bool(heard.append(event))
    await rig.submit(long)
    await rig.submit(short)
    await settle()

    speaker.go.set()
    await ended(rig, short)
    await ended(rig, long)

    order = [event.attempt.request_id for event in heard if isinstance(event, Chunk)]
    assert order.index(short.request_id) == 1


async def test_a_cancelled_speech_stops_after_its_sentence(rig: Rig) -> None:
    speaker = HeldSpeaker(SENTENCES[1])
    engine = held_engine(speaker)
    await engine.start()
    worker = await rig.worker(Stage.AUDIO_SPEAK, engine)
    task = await speak_task(rig)
    await rig.submit(task)
    await until_chunks(rig, task, 1)

    worker.runner.cancel(task.request_id)
    speaker.go.set()
    async with asyncio.timeout(_PATIENCE_S):
        while worker.runner.num_held:
            await asyncio.sleep(0.005)
            await rig.clock.advance(0.1)

    assert len(rig.ingress.view(task.request_id).chunks) == 1
    assert engine.running() == 0


@pytest.mark.parametrize(
    ("text", "params", "param", "words"),
    [
        (TEXT, {"voice": "absent"}, "voice", "tone"),
        (TEXT, {"voice": "nobody"}, "voice", "tone"),
        (TEXT, {"speed": 9.0}, "speed", "4"),
        ("...!?", {}, "input", "said"),
        ("a" * 501, {}, "input", "500"),
    ],
)
async def test_what_cannot_be_said_is_refused(
    rig: Rig, text: str, params: dict[str, Any], param: str, words: str
) -> None:
    await started(rig, Stage.AUDIO_SPEAK, speak_engine())
    task = await speak_task(rig, text, **params)
    await rig.submit(task)

    end = await ended(rig, task)

    assert isinstance(end, Failed)
    assert (end.failure.status, end.failure.param) == (400, param)
    assert words in end.failure.message


async def test_voices_have_further_names_where_there_is_such_a_voice(rig: Rig) -> None:
    engine = speak_engine(voices=("tone", "second"))
    (card,) = await engine.start()

    assert card.voices == ("tone", "second", "alloy", "robin")
    assert (card.input_modalities, card.output_modalities) == ((Modality.TEXT,), (Modality.AUDIO,))
    await rig.worker(Stage.AUDIO_SPEAK, engine)
    task = await speak_task(rig, voice="robin")
    await rig.submit(task)
    assert isinstance(await ended(rig, task), Finished)


async def hear_task(rig: Rig, samples: npt.NDArray[np.float32], **params: Any) -> StepTask:
    """A request whose file preprocess has decoded."""
    pre = PlanStep(step_id=StepId("pre"), stage=Stage.PREPROCESS, model=MODEL, params=PreprocessParams(route="audio"))
    hear = PlanStep(
        step_id=StepId("hear"),
        stage=Stage.AUDIO_TRANSCRIBE,
        model=MODEL,
        params=TranscribeParams(**params),
        needs=(StepId("pre"),),
    )
    await rig.worker(
        Stage.PREPROCESS, ScriptedBatchEngine(lambda item: Product(tensors={"audio0": samples})), worker_id="p0"
    )
    task = chat_task(now_unix_s=rig.clock.unix_s(), plan=Plan(steps=(pre, hear)))
    await rig.submit(task)
    return task


def sound(seconds: float) -> npt.NDArray[np.float32]:
    return np.ones(round(16_000 * seconds), np.float32)


async def test_a_transcript_is_its_head_and_then_passage_by_passage(rig: Rig) -> None:
    await started(rig, Stage.AUDIO_TRANSCRIBE, transcribe_engine())
    task = await hear_task(rig, sound(2.5), word_timestamps=True)

    end = await ended(rig, task)

    head, *segments = map(codec.decode_transcript_part, rig.ingress.view(task.request_id).chunks)
    assert isinstance(end, Finished)
    assert head == TranscriptHead(language="en", duration_s=2.5)
    assert [(part.text, part.end_s) for part in segments if isinstance(part, TranscriptSegment)] == [
        (" passage 0", 1.0),
        (" passage 1", 2.0),
        (" passage 2", 2.5),
    ]


async def test_silence_is_a_head_alone(rig: Rig) -> None:
    await started(rig, Stage.AUDIO_TRANSCRIBE, transcribe_engine())
    task = await hear_task(rig, np.zeros(16_000, np.float32))

    await ended(rig, task)

    assert len(rig.ingress.view(task.request_id).chunks) == 1


async def test_a_killed_transcriber_is_continued_without_a_passage_twice(rig: Rig) -> None:
    first_engine = transcribe_engine(cost_s=0.05)
    await first_engine.start()
    first = await rig.worker(Stage.AUDIO_TRANSCRIBE, first_engine)
    task = await hear_task(rig, sound(6.0))
    await until_chunks(rig, task, 2)
    await first.kill()
    await started(rig, Stage.AUDIO_TRANSCRIBE, transcribe_engine(), "w1")

    await rig.clock.advance(rig.settings.ack_wait_s + 1.0)
    await ended(rig, task)

    view = rig.ingress.view(task.request_id)
    texts = [codec.decode_transcript_part(chunk) for chunk in view.chunks][1:]
    assert [part.text for part in texts if isinstance(part, TranscriptSegment)] == [f" passage {n}" for n in range(6)]
    assert len(view.claims) == 1


async def test_a_step_without_its_audio_fails_alone(rig: Rig) -> None:
    await started(rig, Stage.AUDIO_TRANSCRIBE, transcribe_engine())
    task = await hear_task(rig, np.ones((2, 2), np.float32))

    end = await ended(rig, task)

    assert isinstance(end, Failed)
    assert end.failure.status == 500


async def test_a_model_that_cannot_be_loaded_ends_the_worker() -> None:
    class Broken(ScriptedSpeaker):
        def load(self) -> Any:
            raise OSError("no such file")

    with pytest.raises(EngineDeadError):
        await held_engine(Broken({})).start()


def test_the_stage_is_a_setting() -> None:
    common = {"pool": "p", "model": "m", "engine": "scripted"}

    hearing = build_engine(AudioSettings.model_validate({**common, "stage": "audio_transcribe"}))
    speaking = build_engine(AudioSettings.model_validate({**common, "stage": "audio_speak"}))

    assert isinstance(hearing, TranscribeEngine)
    assert isinstance(speaking, SpeakEngine)
    with pytest.raises(ValueError, match="unknown engine"):
        build_engine(AudioSettings.model_validate({**common, "stage": "audio_speak", "engine": "other"}))


def test_chunks_of_an_older_release_are_whole() -> None:
    data = msgspec.msgpack.encode(
        {"type": "chunk.v1", "attempt": msgspec.to_builtins(_attempt()), "seq": 1, "media_type": "a/b", "data": b"x"}
    )

    event = codec.decode_worker_message(data)

    assert isinstance(event, Chunk)
    assert (event.index, event.piece, event.num_pieces, event.is_last) == (0, 0, 1, False)


def _attempt() -> Any:
    from fleet_contracts.base import RequestId, WorkerId
    from fleet_contracts.events import Attempt

    return Attempt(
        request_id=RequestId("i_1"),
        step_id=StepId("s"),
        stage=Stage.AUDIO_SPEAK,
        worker_id=WorkerId("w"),
        epoch=0,
        delivery=1,
    )
