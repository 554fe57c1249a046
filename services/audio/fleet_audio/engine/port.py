"""What audio needs of a model that hears, and of one that speaks. Kokoro, Piper or a torch voice fill `Speaker`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fleet_contracts.audio import TranscribeParams, TranscriptPart

#: Samples per second of what a `Transcriber` hears.
HEARING_RATE_HZ = 16_000


@dataclass(frozen=True, slots=True)
class TranscriberFacts:
    """Facts of a loaded model that hears.

    Attributes:
        languages: ISO 639-1 codes.
    """

    revision: str
    languages: tuple[str, ...]


class Transcriber(Protocol):
    """Samples into text. Methods block; `transcribe` is called from as many threads as the worker has slots."""

    def load(self) -> TranscriberFacts:
        """Load weights. Raises OSError, ValueError or RuntimeError when they are missing or not understood."""

    def transcribe(self, samples: npt.NDArray[np.float32], params: TranscribeParams) -> Iterator[TranscriptPart]:
        """Transcribe mono samples of 16 kHz.

        Returns:
            First a `TranscriptHead`, then the passages in order, each as soon as it is known; none for silence. The
            same samples and parameters give the same passages.
        Raises:
            EngineOutOfMemoryError: no memory left.
        """


@dataclass(frozen=True, slots=True)
class SpeakerFacts:
    """Facts of a loaded model that speaks.

    Attributes:
        voices: names, the default first.
        min_speed, max_speed: what `synthesize` takes.
    """

    revision: str
    sample_rate_hz: int
    voices: tuple[str, ...]
    min_speed: float
    max_speed: float


class Speaker(Protocol):
    """Text into samples. Methods block and are called from one thread only."""

    def load(self) -> SpeakerFacts:
        """Load weights. Raises OSError, ValueError or RuntimeError when they are missing or not understood."""

    def synthesize(self, text: str, voice: str, speed: float) -> npt.NDArray[np.float32]:
        """Say one sentence.

        Returns:
            float32 [samples] in -1 to 1; empty when there is nothing in it to say.
        Raises:
            EngineOutOfMemoryError: no memory left.
        """
