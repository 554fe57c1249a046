"""`GET /v1/requests/{id}`: what happened to a request."""

from __future__ import annotations

import msgspec

from fleet_ingress.api.errors import ErrorBody


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one step.

    Attributes:
        epoch, delivery: the fence; a retried step has a row per attempt.
        queued_unix_s, started_unix_s, finished_unix_s: wall-clock seconds; null when not (yet) known.
        batch_size: items in the engine batch the step ran in.
        bytes_in, bytes_out: tensor bytes read from and written to the store.
        outcome: `running`, `ok`, or the code of what went wrong.
    """

    step: str
    stage: str
    worker: str
    epoch: int
    delivery: int
    pool: str | None = None
    queued_unix_s: float | None = None
    started_unix_s: float | None = None
    finished_unix_s: float | None = None
    batch_size: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    outcome: str = "running"


class MediaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One media part as the encoder got it.

    Attributes:
        part: where it stood in the request, like `messages[0].content[1].image_url`.
        width, height, mode: of the array given to the encoder, of one frame of a video.
        sha256: hex digest of that array's bytes (uint8 [height, width, 3]).
        num_tokens: tokens it takes in the prompt.
        source_width, source_height: pixels of what the client sent, after EXIF orientation.
        cache_hit: the encoder's feature cache had it.
        grid: steps in time (of a video), or tiles, rows and columns of the encoder's patches; None: it told none.
        duration_s: seconds of audio or video as decoded; `sample_rate_hz`, `num_channels` of what the client sent.
    """

    part: str
    kind: str
    width: int
    height: int
    mode: str
    sha256: str
    num_tokens: int
    source_width: int
    source_height: int
    cache_hit: bool
    grid: tuple[int, int, int] | None = None
    duration_s: float = 0.0
    sample_rate_hz: int = 0
    num_channels: int = 0


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole story of a request; kept for a while after its end.

    Attributes:
        status: `running`, `finished`, `failed`, `cancelled`.
        num_resubmissions: times the ingress published it again from its root source.
    """

    id: str
    route: str
    model: str
    status: str
    created_unix_s: float
    object: str = "fleet.request"
    finished_unix_s: float | None = None
    first_token_unix_s: float | None = None
    num_resubmissions: int = 0
    usage: RequestUsage | None = None
    error: ErrorBody | None = None
    steps: tuple[StepReport, ...] = ()
    media: tuple[MediaReport, ...] = ()
