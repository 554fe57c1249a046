"""Models without weights, for tests and load work, never the default: tones for text, fixed passages for sound."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet_audio.engine.port import HEARING_RATE_HZ, SpeakerFacts, TranscriberFacts
from fleet_common.errors import EngineError
from fleet_contracts.audio import TranscribeParams, TranscriptHead, TranscriptPart, TranscriptSegment, TranscriptWord


class ScriptedTranscriber:
    """Hears one passage per second of sound; silence is no passage."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        """
        Args:
            engine_args: `cost_s` seconds per passage (0), `text` of a passage, `{}` is its number (` passage {}`),
                `languages` (`["en"]`).
        """
        self._cost_s = float(engine_args.get("cost_s", 0.0))
        self._text = str(engine_args.get("text", " passage {}"))
        self._languages = tuple(engine_args.get("languages", ("en",)))

    def load(self) -> TranscriberFacts:
        return TranscriberFacts(revision="scripted-1", languages=self._languages)

    def transcribe(self, samples: npt.NDArray[np.float32], params: TranscribeParams) -> Iterator[TranscriptPart]:
        yield TranscriptHead(
            language=params.language or self._languages[0], duration_s=samples.shape[0] / HEARING_RATE_HZ
        )
        for number in range(-(-samples.shape[0] // HEARING_RATE_HZ)):
            passage = samples[number * HEARING_RATE_HZ : (number + 1) * HEARING_RATE_HZ]
            if not np.any(passage):
                continue
            if self._cost_s:
                time.sleep(self._cost_s)
            yield self._segment(number, number + passage.shape[0] / HEARING_RATE_HZ, params)

    def _segment(self, number: int, end_s: float, params: TranscribeParams) -> TranscriptSegment:
        text = self._text.format(number)
        words = (TranscriptWord(text=text, start_s=float(number), end_s=end_s, probability=1.0),)
        return TranscriptSegment(
            text=text,
            start_s=float(number),
            end_s=end_s,
            token_ids=(number,),
            words=words if params.word_timestamps else (),
        )


class ScriptedSpeaker:
    """Says every character as 10 ms of a tone whose pitch is the character's code."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        """
        Args:
            engine_args: `cost_s` seconds per sentence (0), `sample_rate_hz` (24000), `voices` (`["tone"]`),
                `fail_text` a sentence with it raises EngineError, `exit_text` a sentence with it ends the process.
        """
        self._cost_s = float(engine_args.get("cost_s", 0.0))
        self._rate_hz = int(engine_args.get("sample_rate_hz", 24_000))
        self._voices = tuple(engine_args.get("voices", ("tone",)))
        self._fail_text = str(engine_args.get("fail_text", ""))
        self._exit_text = str(engine_args.get("exit_text", ""))

    def load(self) -> SpeakerFacts:
        return SpeakerFacts(
            revision="scripted-1", sample_rate_hz=self._rate_hz, voices=self._voices, min_speed=0.25, max_speed=4.0
        )

    def synthesize(self, text: str, voice: str, speed: float) -> npt.NDArray[np.float32]:
        if self._exit_text and self._exit_text in text:
            os._exit(137)
        if self._fail_text and self._fail_text in text:
            raise EngineError("scripted failure")
        if self._cost_s:
            time.sleep(self._cost_s)
        num_samples = max(1, int(self._rate_hz / 100 / speed))
        seconds = np.arange(num_samples, dtype=np.float32) / self._rate_hz
        tones = [np.sin(2 * np.pi * (100 + ord(char) % 1000) * seconds) for char in text]
        speech: npt.NDArray[np.float32] = (0.5 * np.concatenate(tones)).astype(np.float32)
        return speech
