"""Recordings in a chat: base64 of strangers into features, under the caps that files to transcribe have."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, replace

from fleet_common.errors import InvalidInputError
from fleet_contracts.preprocess import MediaItem
from fleet_preprocess.core.audio import INVALID, AudioLimits, decode_audio
from fleet_preprocess.core.audio_families import AudioFamily
from fleet_preprocess.core.body import AudioSource
from fleet_preprocess.core.hashing import audio_hash
from fleet_preprocess.core.log_mel import Features


@dataclass(frozen=True, slots=True)
class PreparedAudio:
    """One recording ready for the encoder, and what the timeline says of it."""

    array: Features
    item: MediaItem
    content_hash: str


def prepare_audio(source: AudioSource, family: AudioFamily, limits: AudioLimits, revision: str) -> PreparedAudio:
    """Decode, mix down, resample, and make features.

    Raises:
        InvalidInputError: what `decode_audio` refuses, broken base64 (`invalid_audio`), and recordings of which the
            model would hear nothing (`audio_too_short`).
    """
    data = _decoded(source, limits.max_bytes)
    limits = replace(limits, max_s=min(limits.max_s, family.max_s))
    audio = decode_audio(data, limits, family.rate_hz, param=source.param)
    num_samples = audio.samples.shape[0]
    num_tokens = family.num_tokens(num_samples)
    if not num_tokens:
        raise InvalidInputError(
            f"The audio has {num_samples} samples at {family.rate_hz} Hz, too few for this model to hear.",
            param=source.param,
            code="audio_too_short",
        )
    item = MediaItem(
        part=source.param,
        kind="audio",
        width=0,
        height=0,
        mode="mono",
        sha256=hashlib.sha256(audio.samples.tobytes()).hexdigest(),
        num_tokens=num_tokens,
        duration_s=num_samples / family.rate_hz,
        sample_rate_hz=audio.sample_rate_hz,
        num_channels=audio.num_channels,
        grid=(family.num_positions(num_samples), 1, 1),
    )
    content_hash = audio_hash(audio.samples, settings=family.identity(), revision=revision)
    return PreparedAudio(family.features(audio.samples), item, content_hash)


def _decoded(source: AudioSource, max_bytes: int) -> bytes:
    if len(source.data) * 3 // 4 - 2 > max_bytes:
        raise InvalidInputError(
            f"The audio has more than {max_bytes} bytes.", param=source.param, code="audio_too_large"
        )
    try:
        return base64.b64decode(source.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError("The audio is not valid base64.", param=f"{source.param}.data", code=INVALID) from error
