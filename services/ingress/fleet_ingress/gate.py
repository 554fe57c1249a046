"""The door: counts what the ingress holds and lets the pure rules decide who comes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fleet_common.telemetry.names import IngressMetrics
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.core.admission import AdmissionLimits, Load, decide
from fleet_ingress.errors import RATE_LIMIT, SERVER, ApiError


class Gate:
    """Admission state of one ingress. In a drain `is_stopping` turns true first, `is_draining` when work is refused."""

    def __init__(self, limits: AdmissionLimits, metrics: IngressMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._num_inflight = 0
        self._buffered_bytes = 0
        self.is_stopping = False
        self.is_draining = False

    @property
    def num_inflight(self) -> int:
        """Requests let in and not answered to the end."""
        return self._num_inflight

    @contextmanager
    def admit(self, body_bytes: int) -> Iterator[None]:
        """Hold a place while a request is served. Raises ApiError (429, or 503 while draining) before any work.

        Args:
            body_bytes: announced size of the body, or the limit when the client did not say.
        """
        load = Load(self._num_inflight, self._buffered_bytes, self.is_draining)
        refusal = decide(load, self._limits, body_bytes)
        if refusal is not None:
            self._metrics.admission_rejected_total.labels(refusal.reason).inc()
            if refusal.is_overload:
                body = ErrorBody(message="Too many requests; try again.", type=RATE_LIMIT, code="rate_limit_exceeded")
                raise ApiError(429, body, retry_after_s=refusal.retry_after_s)
            body = ErrorBody(message="The server is stopping; try again.", type=SERVER, code="draining")
            raise ApiError(503, body, retry_after_s=refusal.retry_after_s)
        self._num_inflight += 1
        self._buffered_bytes += body_bytes
        self._metrics.inflight_requests.set(self._num_inflight)
        try:
            yield
        finally:
            self._num_inflight -= 1
            self._buffered_bytes -= body_bytes
            self._metrics.inflight_requests.set(self._num_inflight)
