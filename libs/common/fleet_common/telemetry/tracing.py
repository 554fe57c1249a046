"""Spans linked across the bus by the W3C context that travels in `StepTask.trace`. Export is off by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Span, SpanKind

from fleet_common.settings import TelemetrySettings
from fleet_contracts.base import Stage

_DESTINATION = "fleet.work.{stage}.{pool}.{class}.{lane}"


def setup_tracing(settings: TelemetrySettings, service: str) -> None:
    """Export spans to `otlp_endpoint`; without one, spans cost next to nothing and go nowhere. Call in `__main__`."""
    if not settings.otlp_endpoint:
        return
    # Here, because the exporter takes 0.13 s to import, and most fleets export nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"fleet-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_endpoint)))
    trace.set_tracer_provider(provider)


def carrier() -> dict[str, str]:
    """The current trace context as it goes into `StepTask.trace`; empty when nothing is recorded."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


@contextmanager
def request_span(operation: str, model: str, headers: Mapping[str, str]) -> Iterator[Span]:
    """Server span of one HTTP request, like `chat omnifleet-vlm`."""
    parent = propagate.extract(dict(headers))
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "gen_ai.provider.name": "omnifleet",
    }
    tracer = trace.get_tracer("omnifleet")
    with tracer.start_as_current_span(
        f"{operation} {model}", context=parent, kind=SpanKind.SERVER, attributes=attributes
    ) as span:
        yield span


@contextmanager
def stage_span(operation: str, stage: Stage, parent: Mapping[str, str]) -> Iterator[Span]:
    """Span of one hop: `operation` is send, receive, process or settle.

    `process` and `receive` are consumer spans under the publisher's context given in `parent`.
    """
    kind = SpanKind.PRODUCER if operation == "send" else SpanKind.CONSUMER
    attributes = {
        "messaging.system": "nats",
        "messaging.operation.type": operation,
        "messaging.destination.template": _DESTINATION,
        "fleet.stage": stage.value,
    }
    base = propagate.extract(dict(parent)) if parent else context.get_current()
    tracer = trace.get_tracer("omnifleet")
    with tracer.start_as_current_span(
        f"{operation} {stage.value}", context=base, kind=kind, attributes=attributes
    ) as span:
        yield span
