"""Qwen2-Audio: a window of 30 seconds, and a token per 40 ms of what was said in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet_preprocess.core.log_mel import Features, MelSettings, log_mel


@dataclass(frozen=True, slots=True)
class QwenAudio:
    """Mel features of the whole window; the tower is told by the number of tokens where the recording ends."""

    mel: MelSettings

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any]) -> QwenAudio:
        """From config.json and the feature extractor's settings; ValueError where the tower wants others."""
        mel = MelSettings.read(processor)
        tower = config["audio_config"]
        takes = (int(tower.get("num_mel_bins", 128)), 2 * int(tower.get("max_source_positions", 1500)))
        if takes != (mel.num_bins, mel.num_frames):
            raise ValueError(
                f"the feature extractor makes {mel.num_bins} x {mel.num_frames} features, "
                f"the audio tower takes {takes[0]} x {takes[1]}"
            )
        return cls(mel)

    @property
    def rate_hz(self) -> int:
        return self.mel.rate_hz

    @property
    def max_s(self) -> float:
        return self.mel.window_s

    @property
    def min_tokens(self) -> int:
        return 1

    def identity(self) -> Mapping[str, Any]:
        return asdict(self.mel)

    def num_positions(self, num_samples: int) -> int:
        frames = min(-(-num_samples // self.mel.hop_samples), self.mel.num_frames)
        return (frames - 1) // 2 + 1

    def num_tokens(self, num_samples: int) -> int:
        return max(0, (self.num_positions(num_samples) - 2) // 2 + 1)

    def features(self, samples: npt.NDArray[np.float32]) -> Features:
        return log_mel(samples[: self.mel.num_samples], self.mel)
