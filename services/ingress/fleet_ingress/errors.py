"""Every failure as OpenAI's error envelope: the only place where HTTP statuses are chosen.

No answer ever holds a class name, a path, a traceback or text that is not ours.
"""

from __future__ import annotations

import math

import msgspec

from fleet_common.errors import (
    AdmissionRejectedError,
    DeadlineExceededError,
    DependencyError,
    FleetError,
    OverloadError,
    RequestError,
)
from fleet_contracts.events import Failure
from fleet_contracts.models import ModelState
from fleet_ingress.api.errors import ErrorBody, ErrorEnvelope
from fleet_ingress.core.catalog import Standing
from fleet_ingress.core.reason import public_reason

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"

#: Name under which decode refuses a schema, whatever field it came in.
SCHEMA_PARAM = "response_schema"

_TYPES = frozenset({INVALID_REQUEST, AUTHENTICATION, NOT_FOUND, RATE_LIMIT, SERVER})

#: Answers after which trying again makes sense.
_RETRY_STATUSES = frozenset({429, 503, 504})

#: When to ask again for a model that is loading.
_LOADING_RETRY_S = 5.0

#: status -> (type, code, message) of answers the framework decides on.
_BY_STATUS = {
    400: (INVALID_REQUEST, "bad_request", "The request is malformed."),
    401: (AUTHENTICATION, "invalid_api_key", "A valid API key is required: Authorization: Bearer <key>."),
    404: (NOT_FOUND, "unknown_url", "Nothing is served at this URL."),
    405: (INVALID_REQUEST, "method_not_allowed", "This URL does not take that method."),
    408: (INVALID_REQUEST, "request_timeout", "The request did not arrive in time."),
    413: (INVALID_REQUEST, "request_too_large", "The request body is too large."),
    415: (INVALID_REQUEST, "unsupported_media_type", "Send JSON: Content-Type: application/json."),
    431: (INVALID_REQUEST, "headers_too_large", "The request headers are too large."),
    500: (SERVER, "internal_error", "Something went wrong on our side."),
    503: (SERVER, "unavailable", "The service is not available right now."),
}


class ApiError(Exception):
    """An answer with a status from 400 on."""

    def __init__(self, status: int, body: ErrorBody, *, retry_after_s: float | None = None) -> None:
        super().__init__(body.message)
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s

    @property
    def envelope(self) -> bytes:
        """JSON body of the answer."""
        return msgspec.json.encode(ErrorEnvelope(error=self.body))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Content type, and Retry-After in whole seconds where trying again makes sense."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def by_status(status: int, message: str | None = None) -> ApiError:
    """The answer for a status the framework or the protocol decided on."""
    error_type, code, default = _BY_STATUS.get(status) or _BY_STATUS[400 if status < 500 else 500]
    return ApiError(status, ErrorBody(message=message or default, type=error_type, code=code))


def model_not_found(model: str) -> ApiError:
    """404 for a name that is not served."""
    shown = model if len(model) <= 100 else model[:100] + "..."
    body = ErrorBody(
        message=f"The model `{shown}` does not exist.", type=NOT_FOUND, param="model", code="model_not_found"
    )
    return ApiError(404, body)


def model_not_ready(standing: Standing) -> ApiError:
    """Why a model that is known cannot be asked: it loads, it failed, it is being taken off."""
    name = standing.name
    if standing.state is ModelState.DRAINING:
        message = f"The model `{name}` is being taken off: it takes no new requests."
        return ApiError(404, ErrorBody(message=message, type=NOT_FOUND, param="model", code="model_not_found"))
    if standing.state is ModelState.FAILED:
        message = f"The model `{name}` failed to load: {public_reason(standing.error)}"
        return ApiError(503, ErrorBody(message=message, type=SERVER, param="model", code="model_failed"))
    message = f"The model `{name}` is loading."
    body = ErrorBody(message=message, type=SERVER, param="model", code="model_loading")
    return ApiError(503, body, retry_after_s=_LOADING_RETRY_S)


def from_fleet_error(err: FleetError) -> ApiError:
    """HTTP answer for an error of ours; texts of server-side errors stay inside."""
    match err:
        case RequestError():
            body = ErrorBody(message=str(err), type=INVALID_REQUEST, param=err.param, code=err.code)
            return ApiError(400, body)
        case DeadlineExceededError():
            body = ErrorBody(message="The request was not finished before its deadline.", type=SERVER, code=err.code)
            return ApiError(504, body, retry_after_s=err.retry_after_s)
        case AdmissionRejectedError() | OverloadError():
            return ApiError(
                429, ErrorBody(message=str(err), type=RATE_LIMIT, code=err.code), retry_after_s=err.retry_after_s
            )
        case DependencyError():
            message = "Part of the service cannot be reached right now; try again."
            return ApiError(503, ErrorBody(message=message, type=SERVER, code=err.code), retry_after_s=2.0)
        case _:
            return ApiError(500, ErrorBody(message=_BY_STATUS[500][2], type=SERVER, code=err.code))


def from_failure(failure: Failure, request_id: str, schema_param: str = "") -> ApiError:
    """HTTP answer for what a worker reported. Texts of 5xx are ours: an engine's may hold anything.

    Args:
        schema_param: what the client calls the schema that decode calls `response_schema`.
    """
    status = failure.status if 400 <= failure.status < 600 else 500
    error_type = failure.error_type if failure.error_type in _TYPES else (INVALID_REQUEST if status < 500 else SERVER)
    message = failure.message if status < 500 else f"The request {request_id} failed ({failure.code})."
    param = schema_param or None if failure.param == SCHEMA_PARAM else failure.param
    body = ErrorBody(message=message, type=error_type, param=param, code=failure.code)
    retry_after_s = failure.retry_after_s
    if retry_after_s is None and status in _RETRY_STATUSES:
        retry_after_s = 1.0
    return ApiError(status, body, retry_after_s=retry_after_s)
