"""Hibari: small English voices (ONNX), 24 kHz. A voice is one `.onnx` file of the model's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hibari
import numpy as np
import numpy.typing as npt
from hibari import voices

from fleet_audio.engine.port import SpeakerFacts

_MIN_SPEED, _MAX_SPEED = 0.25, 4.0


class HibariSpeaker:
    """Voices are loaded when they are first used, the default one at start."""

    def __init__(self, folder: str, engine_args: Mapping[str, Any], *, num_threads: int = 1) -> None:
        """
        Args:
            folder: with `<voice>.onnx` files; "": the voice inside the package.
            engine_args: `seed` (0) of the noise in a voice: with one seed a sentence always sounds the same.
        """
        self._folder = folder
        self._seed = int(engine_args.get("seed", 0))
        self._num_threads = num_threads
        self._files: dict[str, Path] = {}
        self._voices: dict[str, hibari.Hibari] = {}

    def load(self) -> SpeakerFacts:
        self._files = self._find()
        default = next(iter(self._files))
        # The first sentence reads the lexicon, a third of a second: not while somebody waits.
        self._voice(default)("Ready.", 1.0, self._seed)
        digest = hashlib.sha256()
        for name, path in self._files.items():
            digest.update(f"{name}:{path.stat().st_size}".encode())
        return SpeakerFacts(
            revision=digest.hexdigest()[:16],
            sample_rate_hz=hibari.SAMPLE_RATE,
            voices=tuple(self._files),
            min_speed=_MIN_SPEED,
            max_speed=_MAX_SPEED,
        )

    def synthesize(self, text: str, voice: str, speed: float) -> npt.NDArray[np.float32]:
        samples: npt.NDArray[np.float32] = self._voice(voice)(text, speed, self._seed)
        return samples

    def _find(self) -> dict[str, Path]:
        """Voice files by name, Hibari's default voice first where it is among them. OSError when there are none."""
        if not self._folder:
            return {voices.DEFAULT: Path(voices.voice_path(voices.DEFAULT))}
        found = {path.stem: path for path in sorted(Path(self._folder).glob("*.onnx"))}
        if not found:
            raise OSError("the folder of the model holds no voice")
        return dict(sorted(found.items(), key=lambda item: item[0] != voices.DEFAULT))

    def _voice(self, name: str) -> hibari.Hibari:
        if name not in self._voices:
            known = name if name in voices.VOICES else voices.DEFAULT
            self._voices[name] = hibari.Hibari(known, model=str(self._files[name]), threads=self._num_threads)
        return self._voices[name]
