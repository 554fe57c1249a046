"""Ids, enumerations and the struct base shared by every contract."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType

import msgspec

RequestId = NewType("RequestId", str)
StepId = NewType("StepId", str)
WorkerId = NewType("WorkerId", str)
IngressId = NewType("IngressId", str)

#: One token of a subject that names a pool: model ids live in the routing table, never in subjects.
PoolName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_-]{1,40}$")]


class Contract(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every struct on the wire.

    Unknown fields are ignored, so release N reads messages of N+1; a field equal to its default is not written.
    """


class Stage(StrEnum):
    """A kind of work. The value is the token used in subjects, stream names and metrics."""

    PREPROCESS = "preprocess"
    VISION_ENCODE = "vision_encode"
    DECODE = "decode"
    DIFFUSION_GENERATE = "diffusion_generate"
    AUDIO_TRANSCRIBE = "audio_transcribe"
    AUDIO_SPEAK = "audio_speak"


class PriorityClass(StrEnum):
    """Priority class of a request; shares 0.6 / 0.3 / 0.1 unless set otherwise."""

    REALTIME = "realtime"
    BATCH = "batch"
    BACKGROUND = "background"


class Modality(StrEnum):
    """What a model can take or give, as reported by `/v1/models`."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    EMBEDDING = "embedding"


#: The lane any worker of a pool pulls from; the other lanes are `w-<worker>`.
ANY_LANE = "any"
