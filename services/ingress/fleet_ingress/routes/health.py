"""`/health/live`, `/health/ready`, `/metrics`."""

from __future__ import annotations

import msgspec
from litestar import Request, Response, get
from litestar.datastructures import State
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from fleet_contracts.models import ModelState
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.api.responses import HealthReport
from fleet_ingress.context import Ingress, ingress_of
from fleet_ingress.errors import SERVER, ApiError

LIVE_PATH = "/health/live"
READY_PATH = "/health/ready"
METRICS_PATH = "/metrics"


@get(LIVE_PATH)
async def get_live(request: Request[None, None, State]) -> Response[bytes]:
    """The process runs, draining included."""
    return Response(msgspec.json.encode(HealthReport(status="live")), media_type="application/json")


@get(READY_PATH)
async def get_ready(request: Request[None, None, State]) -> Response[bytes]:
    """New work is welcome: the table is known and every stage of every served model has a live worker."""
    reason = _why_not_ready(ingress_of(request.scope))
    if reason is not None:
        raise ApiError(503, ErrorBody(message=reason, type=SERVER, code="not_ready"), retry_after_s=1.0)
    return Response(msgspec.json.encode(HealthReport(status="ready")), media_type="application/json")


@get(METRICS_PATH)
async def get_metrics(request: Request[None, None, State]) -> Response[bytes]:
    """Prometheus text format."""
    metrics = ingress_of(request.scope).metrics
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _why_not_ready(ingress: Ingress) -> str | None:
    catalog = ingress.view.catalog
    if ingress.gate.is_stopping:
        return "The server is stopping."
    if not ingress.dispatcher.is_connected:
        return "The message bus cannot be reached."
    if not any(standing.state is ModelState.READY for standing in catalog.standings()):
        return "No model is served yet."
    missing = catalog.missing()
    if missing:
        return "No live worker at " + ", ".join(f"{item.stage.value} of {item.model}" for item in missing) + "."
    return None
