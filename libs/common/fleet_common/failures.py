"""One table from the errors of the fleet to what a client is told. Messages never leak paths, classes or tracebacks."""

from __future__ import annotations

from fleet_common.errors import (
    AdmissionRejectedError,
    CancelledWorkError,
    DeadlineExceededError,
    DependencyError,
    EngineDeadError,
    EngineOutOfMemoryError,
    FleetError,
    OverloadError,
    RequestError,
)
from fleet_contracts.events import Failure

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_OVERLOADED = "overloaded_error"

#: (class, HTTP status, OpenAI error type, message for the client); the first class that matches counts.
_TABLE: tuple[tuple[type[FleetError], int, str, str], ...] = (
    (AdmissionRejectedError, 429, "rate_limit_error", "The service is at its limit; try again later."),
    (DeadlineExceededError, 504, "timeout_error", "The request was not finished before its deadline."),
    (OverloadError, 503, _OVERLOADED, "The service is overloaded; try again later."),
    (DependencyError, 503, _OVERLOADED, "The service is temporarily unavailable; try again later."),
    (EngineOutOfMemoryError, 503, _OVERLOADED, "The request does not fit into the memory left; try again later."),
    (EngineDeadError, 503, _OVERLOADED, "The service is temporarily unavailable; try again later."),
    (CancelledWorkError, 499, _INVALID, "The request was cancelled."),
)

_RETRY_AFTER_S = 1.0


def failure_of(error: BaseException, request_id: str) -> Failure:
    """What a client is told of an error.

    A `RequestError` is about the client's own input and keeps its message; every other message is ours, with the
    request id so that an operator finds the log line.
    """
    if isinstance(error, RequestError):
        return Failure(error_type=_INVALID, code=error.code, message=str(error), status=400, param=error.param)
    for kind, status, error_type, message in _TABLE:
        if isinstance(error, kind):
            return Failure(
                error_type=error_type,
                code=error.code,
                message=f"{message} (request {request_id})",
                status=status,
                retry_after_s=error.retry_after_s if isinstance(error, OverloadError) else _RETRY_AFTER_S,
            )
    code = error.code if isinstance(error, FleetError) else "engine_error"
    return Failure(
        error_type=_SERVER,
        code=code,
        message=f"The service failed on this request. (request {request_id})",
        status=500,
    )


def poison_failure(request_id: str) -> Failure:
    """What a client is told when its request ended every worker that tried it."""
    return Failure(
        error_type=_SERVER,
        code="poison",
        message=f"The service could not process this request. (request {request_id})",
        status=500,
    )
