"""Whether the request being submitted is a line of a durable job: the routes need not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fleet_contracts.base import PriorityClass


@dataclass(frozen=True, slots=True)
class JobOrigin:
    """What a line of a job gets that a client's request does not. `timeout_s`: its deadline."""

    timeout_s: float


_ORIGIN: ContextVar[JobOrigin | None] = ContextVar("fleet_job_origin", default=None)


@contextmanager
def as_job(origin: JobOrigin) -> Iterator[None]:
    """What this task submits while the block runs, it submits for a job."""
    token = _ORIGIN.set(origin)
    try:
        yield
    finally:
        _ORIGIN.reset(token)


def class_and_timeout(asked: PriorityClass, timeout_s: float) -> tuple[PriorityClass, float]:
    """Class and deadline of what is submitted now: a job never runs among the realtime requests, and may take long."""
    origin = _ORIGIN.get()
    if origin is None:
        return asked, timeout_s
    return PriorityClass.BATCH if asked is PriorityClass.REALTIME else asked, origin.timeout_s
