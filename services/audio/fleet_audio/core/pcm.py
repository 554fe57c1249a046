"""Samples as bytes. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FULL_SCALE = 32767.0


def pcm16(samples: npt.NDArray[np.float32]) -> bytes:
    """float32 [samples] in -1 to 1 as 16-bit little-endian; what is louder is cut, what is no number is silent."""
    finite = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0)
    return (np.clip(finite, -1.0, 1.0) * _FULL_SCALE).round().astype("<i2").tobytes()
