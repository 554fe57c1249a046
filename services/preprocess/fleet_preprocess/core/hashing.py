"""What identifies a medium to caches: 256 bits, never shortened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet_preprocess.core.images import RgbArray


def pixel_digest(rgb: RgbArray) -> str:
    """sha256 hex of the bytes of uint8 [..., height, width, 3]."""
    return hashlib.sha256(rgb.data).hexdigest()


def content_hash(rgb: RgbArray, *, settings: Mapping[str, Any], revision: str) -> str:
    """sha256 hex over decoded pixels (of a video: of its frames), shape, mode, processor settings and model revision.

    Hashing decoded RGB, not the file nor palette indices: two files of one picture share a key, and two pictures
    never do.
    """
    facts = {"shape": rgb.shape, "mode": "RGB", "settings": settings, "revision": revision}
    digest = hashlib.sha256(b"omnifleet.image.v1\0")
    digest.update(json.dumps(facts, sort_keys=True).encode() + b"\0")
    digest.update(rgb.data)
    return digest.hexdigest()


def audio_hash(samples: npt.NDArray[np.float32], *, settings: Mapping[str, Any], revision: str) -> str:
    """sha256 hex over decoded samples, their number, the feature extractor's settings and model revision."""
    facts = {"shape": samples.shape, "settings": settings, "revision": revision}
    digest = hashlib.sha256(b"omnifleet.audio.v1\0")
    digest.update(json.dumps(facts, sort_keys=True).encode() + b"\0")
    digest.update(np.ascontiguousarray(samples).data)
    return digest.hexdigest()
