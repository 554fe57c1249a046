"""Every metric of the fleet, defined once. Labels are bounded: stage, model, outcome, never a request id.

`gen_ai.*` names follow OpenTelemetry's GenAI semantic conventions (Development status, v1.37), spelt the Prometheus
way: dots become underscores, the unit is a suffix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SLOW_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class BusCollector(Collector):
    """Counters the bus keeps itself, read when somebody scrapes. Every process registers one.

    Args:
        totals: (messages dropped by the client library, reconnects) since the start.
    """

    def __init__(self, totals: Callable[[], tuple[int, int]]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by the registry."""
        num_drops, num_reconnects = self._totals()
        yield CounterMetricFamily("fleet_bus_drops", "Messages the client library dropped.", value=num_drops)
        yield CounterMetricFamily("fleet_bus_reconnects", "Connections that came back.", value=num_reconnects)


class WorkerMetrics:
    """Metrics of a worker of any stage; one instance per process, made in the composition root."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        registry = self.registry
        labels = ("stage", "model")
        self.queue_wait_seconds = Histogram(
            "fleet_stage_queue_wait_seconds", "Enqueue to start of a step.", labels, buckets=_FAST_S, registry=registry
        )
        self.service_seconds = Histogram(
            "fleet_stage_service_seconds", "Engine time of a step.", labels, buckets=_SLOW_S, registry=registry
        )
        self.batch_size = Histogram(
            "fleet_stage_batch_size",
            "Items per engine call.",
            labels,
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.steps_total = Counter(
            "fleet_stage_steps_total", "Steps settled, by outcome.", (*labels, "outcome"), registry=registry
        )
        self.inflight_requests = Gauge(
            "fleet_stage_inflight_requests", "Steps the engine runs now.", ("stage",), registry=registry
        )
        self.queued_requests = Gauge(
            "fleet_stage_queued_requests", "Steps held and not started.", ("stage", "priority_class"), registry=registry
        )
        self.redelivered_total = Counter(
            "fleet_stage_redelivered_total", "Deliveries after the first.", ("stage",), registry=registry
        )
        self.repairs_total = Counter(
            "fleet_stage_repairs_total",
            "Producing steps published again after a tensor miss.",
            ("stage",),
            registry=registry,
        )
        self.dead_letters_total = Counter(
            "fleet_stage_dead_letters_total", "Messages sent to fleet.dead.", ("stage", "reason"), registry=registry
        )
        self.feature_cache_total = Counter(
            "fleet_feature_cache_total", "Look-ups in the feature cache.", ("stage", "outcome"), registry=registry
        )
        self.vision_patches_total = Counter(
            "fleet_vision_patches_total",
            "Patches of the vision tower: `needed` by images, and `computed` with padding.",
            ("kind",),
            registry=registry,
        )
        self.diffusion_batch_pictures = Histogram(
            "fleet_diffusion_batch_pictures",
            "Pictures that took one denoising step together.",
            ("model",),
            buckets=(1, 2, 4, 8, 16, 32),
            registry=registry,
        )
        self.diffusion_parked_total = Counter(
            "fleet_diffusion_parked_total",
            "Pictures that gave their place to a more urgent one.",
            ("model",),
            registry=registry,
        )
        self.output_tokens_total = Counter(
            "fleet_decode_output_tokens_total", "Tokens generated.", ("model",), registry=registry
        )
        self.kv_cache_usage_ratio = Gauge(
            "fleet_decode_kv_cache_usage_ratio", "KV cache in use, 0-1.", ("model",), registry=registry
        )
        self.store_bytes = Gauge(
            "fleet_tensor_store_bytes", "Bytes held in the tensor store.", ("connector",), registry=registry
        )
        self.store_operations = Gauge(
            "fleet_tensor_store_operations",
            "Operations since the start, by kind (put, get, miss, full, spill).",
            ("connector", "operation"),
            registry=registry,
        )


class IngressMetrics:
    """Metrics of an ingress; one instance per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        registry = self.registry
        labels = ("route", "model")
        self.request_duration_seconds = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Request duration.",
            (*labels, "outcome"),
            buckets=_SLOW_S,
            registry=registry,
        )
        self.time_to_first_token_seconds = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to first token.",
            labels,
            buckets=_FAST_S,
            registry=registry,
        )
        self.time_per_output_token_seconds = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token after the first.",
            labels,
            buckets=_FAST_S,
            registry=registry,
        )
        self.tokens_total = Counter(
            "gen_ai_client_token_usage_total", "Tokens, by kind (input, output).", (*labels, "kind"), registry=registry
        )
        self.inflight_requests = Gauge(
            "fleet_ingress_inflight_requests", "Requests accepted and not ended.", (), registry=registry
        )
        self.admission_rejected_total = Counter(
            "fleet_admission_rejected_total", "Requests refused before any work.", ("reason",), registry=registry
        )
        self.cancelled_total = Counter(
            "fleet_requests_cancelled_total", "Requests whose client left.", ("route",), registry=registry
        )
        self.resubmitted_total = Counter(
            "fleet_requests_resubmitted_total",
            "Requests published again from their root.",
            ("reason",),
            registry=registry,
        )
        self.events_dropped_total = Counter(
            "fleet_events_dropped_total", "Events of outranked or ended attempts.", ("reason",), registry=registry
        )
        self.jobs_driven = Gauge("fleet_jobs_driven", "Durable jobs this ingress drives.", (), registry=registry)
        self.job_lines_total = Counter(
            "fleet_job_lines_total", "Lines of jobs with an outcome (ok, failed).", ("outcome",), registry=registry
        )


class PlacementMetrics:
    """Metrics of placement; one instance per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        registry = self.registry
        self.is_leader = Gauge("fleet_placement_is_leader", "1 while this process leads.", (), registry=registry)
        self.table_revision = Gauge("fleet_routing_table_revision", "Revision in force.", (), registry=registry)
        self.worker_share_ratio = Gauge(
            "fleet_routing_worker_share_ratio",
            "Share of a worker in its pool, 0-1.",
            ("stage", "pool", "worker"),
            registry=registry,
        )
        self.pool_pending = Gauge(
            "fleet_pool_pending_messages",
            "Messages waiting in a pool.",
            ("stage", "pool", "priority_class"),
            registry=registry,
        )
        self.moved_total = Counter(
            "fleet_mover_moved_total", "Messages the mover published again.", ("stage", "reason"), registry=registry
        )
        self.dead_letters_total = Counter(
            "fleet_mover_dead_letters_total", "Messages the mover dead-lettered.", ("stage",), registry=registry
        )
