"""Log-mel spectrograms as transformers' feature extractor of Whisper makes them (a test compares), by numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]

_FLOOR = 1e-10
_MAX_HZ = 8000.0
#: Slaney's scale: linear up to this frequency, logarithmic above.
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0


@dataclass(frozen=True, slots=True)
class MelSettings:
    """Settings of the feature extractor.

    Attributes:
        num_bins: mel bins of a frame.
        rate_hz: samples per second.
        fft_samples, hop_samples: of a window, and from one to the next.
        window_s: seconds every recording is padded to; nothing longer is taken.
    """

    num_bins: int = 128
    rate_hz: int = 16_000
    fft_samples: int = 400
    hop_samples: int = 160
    window_s: int = 30

    @classmethod
    def read(cls, processor: Mapping[str, Any]) -> MelSettings:
        """From the feature extractor's settings; ValueError for what is not followed here."""
        kind = processor.get("feature_extractor_type", "WhisperFeatureExtractor")
        if kind != "WhisperFeatureExtractor":
            raise ValueError(f"the feature extractor {kind} is not supported")
        if processor.get("dither") or processor.get("padding_value"):
            raise ValueError("feature extractors with dither, or padding that is no silence, are not supported")
        return cls(
            num_bins=int(processor.get("feature_size", 80)),
            rate_hz=int(processor.get("sampling_rate", 16_000)),
            fft_samples=int(processor.get("n_fft", 400)),
            hop_samples=int(processor.get("hop_length", 160)),
            window_s=int(processor.get("chunk_length", 30)),
        )

    @property
    def num_samples(self) -> int:
        """Samples of the whole window."""
        return self.window_s * self.rate_hz

    @property
    def num_frames(self) -> int:
        """Frames of the whole window."""
        return self.num_samples // self.hop_samples


def log_mel(samples: npt.NDArray[np.float32], settings: MelSettings) -> Features:
    """float32 [samples], at most `settings.num_samples`, -> float32 [num_bins, num_frames], silence behind the end."""
    padded = np.zeros(settings.num_samples, dtype=np.float32)
    padded[: samples.shape[0]] = samples
    half = settings.fft_samples // 2
    padded = np.pad(padded, half, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, settings.fft_samples)[:: settings.hop_samples]
    spectrum = np.fft.rfft(windows[: settings.num_frames] * _hann(settings.fft_samples), axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    mels = power @ _filters(settings.num_bins, settings.fft_samples, settings.rate_hz)
    logs = np.log10(np.maximum(mels, _FLOOR))
    logs = (np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
    return np.ascontiguousarray(logs.T, dtype=np.float32)


@cache
def _hann(size: int) -> npt.NDArray[np.float64]:
    window: npt.NDArray[np.float64] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    return window


@cache
def _filters(num_bins: int, fft_samples: int, rate_hz: int) -> npt.NDArray[np.float32]:
    """Slaney's triangles of equal area, float32 [frequencies, num_bins]."""
    frequencies = np.linspace(0.0, rate_hz / 2, fft_samples // 2 + 1)
    edges = _hertz(np.linspace(0.0, _mels(_MAX_HZ), num_bins + 2))
    slopes = edges[None, :] - frequencies[:, None]
    rising = -slopes[:, :-2] / np.diff(edges)[:-1]
    falling = slopes[:, 2:] / np.diff(edges)[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    scaled: npt.NDArray[np.float32] = (triangles * (2.0 / (edges[2:] - edges[:-2]))).astype(np.float32)
    return scaled


def _mels(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return 3.0 * hertz / 200.0
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    linear = 200.0 * mels / 3.0
    return np.where(mels < _LINEAR_MELS, linear, _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS)))
