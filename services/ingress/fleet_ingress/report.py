"""The one log line and the metrics of an ended request."""

from __future__ import annotations

import structlog

from fleet_common.telemetry.names import IngressMetrics
from fleet_contracts.events import Usage
from fleet_ingress.live import LiveRequest

log = structlog.get_logger(__name__)


def report_request(metrics: IngressMetrics, operation: str, live: LiveRequest) -> None:
    """Say once, when the HTTP exchange is over, what became of the request."""
    end = live.state.end
    usage = end.usage if end is not None else None
    failure = end.failure if end is not None else None
    duration_s = (live.ended_unix_s or live.created_unix_s) - live.created_unix_s
    ttft_s = None if live.first_token_unix_s is None else live.first_token_unix_s - live.created_unix_s
    kind = "ok" if usage is not None else "cancelled" if failure is None else "failed"
    labels = (operation, live.parsed.model)
    metrics.request_duration_seconds.labels(*labels, kind).observe(duration_s)
    if ttft_s is not None:
        metrics.time_to_first_token_seconds.labels(*labels).observe(ttft_s)
    if usage is not None and not live.parsed.is_count:
        _observe_usage(metrics, labels, usage, duration_s - (ttft_s or 0.0))
    log.info(
        "request_finished",
        request_id=live.request_id,
        route=operation,
        model=live.parsed.model,
        tenant=live.tenant,
        outcome=kind if failure is None else failure.code,
        is_stream=live.parsed.is_stream,
        num_media=len(live.parsed.media),
        duration_s=round(duration_s, 4),
        ttft_s=None if ttft_s is None else round(ttft_s, 4),
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        completion_tokens=usage.completion_tokens if usage is not None else None,
    )


def _observe_usage(metrics: IngressMetrics, labels: tuple[str, str], usage: Usage, after_first_s: float) -> None:
    metrics.tokens_total.labels(*labels, "input").inc(usage.prompt_tokens)
    metrics.tokens_total.labels(*labels, "output").inc(usage.completion_tokens)
    if usage.completion_tokens > 1:
        per_token_s = after_first_s / (usage.completion_tokens - 1)
        metrics.time_per_output_token_seconds.labels(*labels).observe(per_token_s)
