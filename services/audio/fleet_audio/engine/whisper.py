"""Whisper through faster-whisper (CTranslate2): any id or folder of that format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import numpy.typing as npt
from faster_whisper import WhisperModel
from faster_whisper.vad import VadOptions, get_speech_timestamps

from fleet_audio.engine.port import HEARING_RATE_HZ, TranscriberFacts
from fleet_common.errors import EngineOutOfMemoryError
from fleet_contracts.audio import TranscribeParams, TranscriptHead, TranscriptPart, TranscriptSegment, TranscriptWord

#: Hotter attempts at a passage that comes out repetitive or improbable, as Whisper's authors have it.
_FALLBACK_STEP = 0.2
_SEED = 0


class WhisperTranscriber:
    """Voice filter first: what holds no speech gives no text, where Whisper alone would make some up."""

    def __init__(
        self, model: str, engine_args: Mapping[str, Any], *, num_threads: int = 1, num_workers: int = 1
    ) -> None:
        """
        Args:
            model: folder, or Hugging Face id of a CTranslate2 conversion.
            engine_args: reaches `WhisperModel` untouched (`device`, `compute_type`, ...), over our defaults
                `device=auto`, `compute_type=int8` (on a CPU; `default` elsewhere); and `beam_size` (5).
            num_workers: transcriptions at once.
        """
        self._path = model
        args = dict(engine_args)
        self._beam_size = int(args.pop("beam_size", 5))
        self._args = {"cpu_threads": num_threads, "num_workers": num_workers, **args}
        self._model: WhisperModel | None = None

    def load(self) -> TranscriberFacts:
        has_gpu = ctranslate2.get_cuda_device_count() > 0
        on_cpu = self._args.get("device", "auto") == "cpu" or not has_gpu
        self._model = WhisperModel(self._path, **{"compute_type": "int8" if on_cpu else "default", **self._args})
        ctranslate2.set_random_seed(_SEED)
        languages = tuple(self._model.supported_languages)
        return TranscriberFacts(revision=self._revision(), languages=languages)

    def transcribe(self, samples: npt.NDArray[np.float32], params: TranscribeParams) -> Iterator[TranscriptPart]:
        duration_s = samples.shape[0] / HEARING_RATE_HZ
        speech = get_speech_timestamps(samples, VadOptions()) if samples.shape[0] else []
        if not speech:
            yield TranscriptHead(language=params.language or self._first_language(), duration_s=duration_s)
            return
        try:
            yield from self._segments(samples, params, duration_s)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or "out of memory" in str(error):
                raise EngineOutOfMemoryError("no memory for this transcription") from error
            raise

    def _segments(
        self, samples: npt.NDArray[np.float32], params: TranscribeParams, duration_s: float
    ) -> Iterator[TranscriptPart]:
        segments, info = self._loaded().transcribe(
            samples,
            language=params.language or None,
            initial_prompt=params.prompt or None,
            temperature=_temperatures(params.temperature),
            beam_size=self._beam_size,
            word_timestamps=params.word_timestamps,
            vad_filter=True,
        )
        yield TranscriptHead(language=info.language, duration_s=duration_s)
        for segment in segments:
            yield TranscriptSegment(
                text=segment.text,
                start_s=round(float(segment.start), 3),
                # The model works in windows of 30 s: its last passage may end after the audio does.
                end_s=round(min(float(segment.end), duration_s), 3),
                token_ids=tuple(segment.tokens),
                temperature=float(segment.temperature or 0.0),
                avg_logprob=float(segment.avg_logprob),
                compression_ratio=float(segment.compression_ratio),
                no_speech_prob=float(segment.no_speech_prob),
                words=tuple(
                    TranscriptWord(
                        text=word.word,
                        start_s=round(float(word.start), 3),
                        end_s=round(float(word.end), 3),
                        probability=round(float(word.probability), 4),
                    )
                    for word in segment.words or ()
                ),
            )

    def _loaded(self) -> WhisperModel:
        if self._model is None:
            raise ValueError("the model is not loaded")
        return self._model

    def _first_language(self) -> str:
        languages = self._loaded().supported_languages
        return "en" if "en" in languages else str(languages[0])

    def _revision(self) -> str:
        config = Path(self._path) / "config.json"
        if not config.is_file():
            return self._path
        weights = Path(self._path) / "model.bin"
        size = weights.stat().st_size if weights.is_file() else 0
        return hashlib.sha256(config.read_bytes() + str(size).encode()).hexdigest()[:16]


def _temperatures(first: float) -> list[float]:
    count = int((1.0 - first) / _FALLBACK_STEP + 1e-6) + 1
    return [round(first + _FALLBACK_STEP * step, 2) for step in range(max(1, count))]
