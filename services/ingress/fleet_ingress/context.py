"""What the routes stand on; one instance per process, made in the composition root."""

from __future__ import annotations

from dataclasses import dataclass

from litestar.types import Scope

from fleet_common.clock import Clock
from fleet_common.telemetry.names import IngressMetrics
from fleet_ingress.dispatcher import Dispatcher
from fleet_ingress.gate import Gate
from fleet_ingress.idempotency import IdempotentAnswers
from fleet_ingress.jobs.desk import JobDesk
from fleet_ingress.picture_links import PictureLinks
from fleet_ingress.pipelines.shelf import PipelineShelf
from fleet_ingress.settings import IngressSettings
from fleet_ingress.view import FleetView

#: Key of the ingress in an ASGI scope's state: set by `app.bind`, read by the routes.
INGRESS_KEY = "fleet_ingress"
#: Key of the tenant in an ASGI scope's state: set by the edge, read by the routes.
TENANT_KEY = "fleet_tenant"


@dataclass(frozen=True, slots=True)
class Ingress:
    """One ingress."""

    settings: IngressSettings
    dispatcher: Dispatcher
    view: FleetView
    gate: Gate
    answers: IdempotentAnswers
    jobs: JobDesk
    links: PictureLinks
    pipelines: PipelineShelf
    metrics: IngressMetrics
    clock: Clock


def ingress_of(scope: Scope) -> Ingress:
    """Whose request it is."""
    ingress = scope["state"][INGRESS_KEY]
    assert isinstance(ingress, Ingress)
    return ingress
