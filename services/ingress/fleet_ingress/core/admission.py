"""Whether a request may start: decided before its body is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one ingress.

    Attributes:
        max_inflight_requests: accepted and not ended.
        max_buffered_bytes: bodies held at once; each is kept until its request ends.
    """

    max_inflight_requests: int
    max_buffered_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """What the ingress holds right now."""

    num_inflight: int = 0
    buffered_bytes: int = 0
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not; `reason` is a bounded label, `retry_after_s` when to try again."""

    reason: str
    is_overload: bool
    retry_after_s: float


def decide(load: Load, limits: AdmissionLimits, body_bytes: int) -> Refusal | None:
    """None to admit.

    Args:
        body_bytes: what the client announced; the body limit when it did not say.
    """
    if load.is_draining:
        return Refusal("draining", is_overload=False, retry_after_s=1.0)
    if load.num_inflight >= limits.max_inflight_requests:
        return Refusal("inflight", is_overload=True, retry_after_s=1.0)
    if load.buffered_bytes and load.buffered_bytes + body_bytes > limits.max_buffered_bytes:
        return Refusal("body_bytes", is_overload=True, retry_after_s=2.0)
    return None
