"""The engines of both stages: samples in, passages out; text in, sentences of speech out. Each streams what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fleet_audio.core.pcm import pcm16
from fleet_audio.engine.port import Speaker, SpeakerFacts, Transcriber
from fleet_common.errors import (
    CancelledWorkError,
    ContractError,
    EngineDeadError,
    EngineOutOfMemoryError,
    InvalidInputError,
)
from fleet_common.sentences import sentences
from fleet_common.stage.port import StepItem, TokenSink
from fleet_contracts import codec
from fleet_contracts.audio import (
    TRANSCRIPT_MEDIA_TYPE,
    SpeakParams,
    TranscribeParams,
    TranscriptPart,
    pcm_media_type,
)
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_contracts.events import Usage

T = TypeVar("T")

#: Usage of audio is not counted in tokens.
_NO_TOKENS = Usage(prompt_tokens=0, completion_tokens=0)

_LOAD_ERRORS = (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError)


class TranscribeEngine:
    """Each request on a thread of its own, passage by passage. Implements `StreamEngine`."""

    needs_root = False

    def __init__(self, model: str, transcriber: Transcriber, *, slots: int) -> None:
        """
        Args:
            model: name under which clients ask for the model.
        """
        self.slots = slots
        self._model = model
        self._transcriber = transcriber
        self._num_running = 0
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="transcribe")

    async def start(self) -> tuple[ModelCard, ...]:
        try:
            facts = await _in_thread(self._threads, self._transcriber.load)
        except _LOAD_ERRORS as error:
            raise EngineDeadError(f"the model could not be loaded: {error}") from error
        return (
            ModelCard(
                model=self._model,
                input_modalities=(Modality.AUDIO,),
                output_modalities=(Modality.TEXT,),
                revision=facts.revision,
                languages=facts.languages,
            ),
        )

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        params = item.task.step.params
        if not isinstance(params, TranscribeParams):
            raise ContractError(f"audio_transcribe cannot run {type(params).__name__}")
        # What the client has already is heard again, and not said again: passages hang on those before them.
        num_known = num_chunks_known(sink)
        parts = self._transcriber.transcribe(_samples(item), params)
        self._num_running += 1
        try:
            number = 0
            while (part := await _in_thread(self._threads, lambda: _next(parts))) is not None:
                if sink.is_cancelled:
                    raise CancelledWorkError("nobody waits for this transcript")
                if number >= num_known:
                    await sink.chunk(TRANSCRIPT_MEDIA_TYPE, codec.encode(part))
                number += 1
        finally:
            self._num_running -= 1
        return _NO_TOKENS

    def running(self) -> int:
        return self._num_running

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class SpeakEngine:
    """Requests take turns sentence by sentence, so that nobody's first one waits for another's last.

    Implements `StreamEngine`.
    """

    needs_root = True

    def __init__(
        self,
        model: str,
        speaker: Speaker,
        *,
        slots: int,
        max_text_chars: int,
        sentence_chars: int,
        voice_aliases: Mapping[str, str],
    ) -> None:
        """
        Args:
            model: name under which clients ask for the model.
            sentence_chars: longest piece of text said in one go.
            voice_aliases: further names of voices; "" stands for the default voice.
        """
        self.slots = slots
        self._model = model
        self._speaker = speaker
        self._max_text_chars = max_text_chars
        self._sentence_chars = sentence_chars
        self._aliases = voice_aliases
        self._facts: SpeakerFacts | None = None
        self._num_running = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speak")

    async def start(self) -> tuple[ModelCard, ...]:
        try:
            facts = self._facts = await _in_thread(self._thread, self._speaker.load)
        except _LOAD_ERRORS as error:
            raise EngineDeadError(f"the model could not be loaded: {error}") from error
        return (
            ModelCard(
                model=self._model,
                input_modalities=(Modality.TEXT,),
                output_modalities=(Modality.AUDIO,),
                revision=facts.revision,
                voices=self._voice_names(),
            ),
        )

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        params = item.task.step.params
        if not isinstance(params, SpeakParams):
            raise ContractError(f"audio_speak cannot run {type(params).__name__}")
        facts = self._loaded()
        voice, speed = self._voice(params.voice), params.speed
        if not facts.min_speed <= speed <= facts.max_speed:
            raise InvalidInputError(
                f"`speed` of this voice is {facts.min_speed:g} to {facts.max_speed:g}.", param="speed"
            )
        pieces = sentences(self._text(item), self._sentence_chars)
        if not pieces:
            raise InvalidInputError("`input` holds nothing that can be said.", param="input")
        self._num_running += 1
        try:
            # A later attempt goes on with the first sentence that the client does not have.
            await self._say(pieces[num_chunks_known(sink) :], voice, speed, sink)
        finally:
            self._num_running -= 1
        return _NO_TOKENS

    async def _say(self, pieces: Sequence[str], voice: str, speed: float, sink: TokenSink) -> None:
        media_type = pcm_media_type(self._loaded().sample_rate_hz)
        for number, piece in enumerate(pieces, start=1):
            if sink.is_cancelled:
                raise CancelledWorkError("nobody listens")

            def synthesize(text: str = piece) -> bytes:
                return pcm16(self._speaker.synthesize(text, voice, speed))

            speech = await _in_thread(self._thread, synthesize)
            await sink.chunk(media_type, speech, is_last=number == len(pieces))

    def running(self) -> int:
        return self._num_running

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _loaded(self) -> SpeakerFacts:
        if self._facts is None:
            raise EngineDeadError("the engine was not started")
        return self._facts

    def _voice_names(self) -> tuple[str, ...]:
        facts = self._loaded()
        aliases = (name for name, voice in self._aliases.items() if not voice or voice in facts.voices)
        return tuple(dict.fromkeys((*facts.voices, *aliases)))

    def _voice(self, name: str) -> str:
        """The model's own name of a voice. Raises InvalidInputError, naming those there are."""
        voices = self._loaded().voices
        own = name if name in voices else self._aliases.get(name, name) or voices[0]
        if own not in voices:
            known = ", ".join(self._voice_names())
            raise InvalidInputError(f"`voice` is one of: {known}.", param="voice", code="unknown_voice")
        return own

    def _text(self, item: StepItem) -> str:
        """From the step before, else the root. Raises InvalidInputError."""
        arrays = [array for (_, name), array in item.tensors.items() if name == "text"]
        raw = arrays[0].tobytes() if arrays else item.root
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError("`input` is no text.", param="input") from error
        if len(text) > self._max_text_chars:
            raise InvalidInputError(
                f"`input` has {len(text)} characters, this model takes {self._max_text_chars}.",
                param="input",
                code="text_too_long",
            )
        return text


def num_chunks_known(sink: TokenSink) -> int:
    """Media of this request that the client side has already."""
    progress = sink.resume_point()
    return progress[0].num_chunks if progress else 0


def _samples(item: StepItem) -> npt.NDArray[np.float32]:
    """`audio0` of the step before. ContractError when there is none."""
    for (_, name), array in item.tensors.items():
        if name == "audio0":
            if array.ndim != 1 or array.dtype != np.float32:
                raise ContractError(f"audio0 is {array.dtype} {array.shape}, not float32 [samples]")
            samples: npt.NDArray[np.float32] = array.view(np.float32)
            return samples
    raise ContractError("the step has no audio among its inputs")


def _next(parts: Iterator[TranscriptPart]) -> TranscriptPart | None:
    return next(parts, None)


async def _in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work)
    except MemoryError as error:
        raise EngineOutOfMemoryError("no memory left") from error
