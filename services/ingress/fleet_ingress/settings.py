"""Settings of the ingress: environment variables `FLEET_INGRESS_*`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import ServiceSettings


class IngressSettings(ServiceSettings):
    """What one ingress is told."""

    model_config = SettingsConfigDict(
        env_prefix="FLEET_INGRESS_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    http_host: str = Field("127.0.0.1", description="Address to listen on.")
    http_port: int = Field(8080, description="Port to listen on; 0: any free one.", ge=0, le=65535)
    public_url: str = Field("", description="URL put into the registry; empty: http://<http_host>:<port>.")
    api_keys: dict[str, SecretStr] = Field(
        default_factory=dict,
        description='Tenant -> key, like {"acme": "sk-..."}; empty: no key needed, tenant `default`.',
    )
    cors_origins: tuple[str, ...] = Field((), description="Browser origins that may call; `*` for any.")
    max_body_bytes: int = Field(32 << 20, description="Largest request body; above: 413.", ge=1024)
    max_header_bytes: int = Field(64 << 10, description="Request line and headers together; above: 431.", ge=1024)
    header_timeout_s: float = Field(10.0, description="Longest time for all headers to arrive.", gt=0)
    body_timeout_s: float = Field(60.0, description="Longest time for a body to arrive.", gt=0)
    write_timeout_s: float = Field(30.0, description="A client that does not read that long is left.", gt=0)
    max_inflight_requests: int = Field(5000, description="Accepted and not ended; above: 429.", ge=1)
    max_buffered_bytes: int = Field(1 << 30, description="Bodies held at once; above: 429.", ge=1 << 20)
    max_choices: int = Field(16, description="Largest `n`.", ge=1)
    request_timeout_s: float = Field(300.0, description="Deadline of a request that does not name one.", gt=0)
    publish_timeout_s: float = Field(8.0, description="How long the first publish may be tried before 503.", gt=0)
    resubmit_after_s: float = Field(20.0, description="Silence of a running step before resubmission.", gt=0)
    max_resubmissions: int = Field(3, description="Resubmissions per request.", ge=0)
    lease_s: float = Field(6.0, description="Registry lease; renewed three times in that span.", ge=1)
    report_ttl_s: float = Field(600.0, description="How long the timeline of an ended request is kept.", gt=0)
    max_reports: int = Field(10_000, description="Timelines of ended requests kept at most.", ge=0)
    idempotency_ttl_s: float = Field(600.0, description="How long the answer to an Idempotency-Key is kept.", gt=0)
    max_idempotent_answers: int = Field(10_000, description="Answers to Idempotency-Keys kept at most.", ge=1)
    max_idempotent_bytes: int = Field(64 << 20, description="Their bytes, together.", ge=0)
    max_file_bytes: int = Field(64 << 20, description="Largest file; above: 413.", ge=1024)
    max_files_per_tenant: int = Field(1000, description="Files a tenant may keep; above: 429.", ge=1)
    max_file_bytes_per_tenant: int = Field(1 << 30, description="Their bytes, together; above: 429.", ge=1024)
    max_job_lines: int = Field(50_000, description="Lines of a batch; above: 400.", ge=1)
    max_open_jobs_per_tenant: int = Field(100, description="Jobs that are not over; above: 429.", ge=1)
    job_max_driven: int = Field(
        4, description="Jobs this ingress drives at once; others wait, or another takes them.", ge=1
    )
    job_max_running_lines: int = Field(16, description="Lines of all these jobs that run at once.", ge=1)
    job_line_timeout_s: float = Field(1800.0, description="Deadline of one attempt at a line.", gt=0)
    job_max_attempts: int = Field(3, description="Attempts at a line that fails by our fault.", ge=1)
    job_lease_s: float = Field(6.0, description="Lease on a job; renewed three times in that span.", ge=1)
    job_model_grace_s: float = Field(
        90.0, description="After a start: a job of before waits that long for a model it does not find.", ge=0
    )
    pipelines_dir: Path | None = Field(
        None, description="Folder of pipelines (*.yaml), followed while it serves; none: no pipelines."
    )
    drain_delay_s: float = Field(0.0, description="After SIGTERM: not ready, but still taking work, this long.", ge=0)
    drain_s: float = Field(8.0, description="After that: longest time for accepted requests to end.", ge=0)
    image_url_ttl_s: float = Field(
        3600.0, description="How long a picture behind a URL can be fetched.", ge=1, le=86_400
    )
    is_image_url_public: bool = Field(
        False, description="With keys set: who knows the URL of a picture needs none; the same at every ingress."
    )
    is_metrics_public: bool = Field(False, description="With keys set: /metrics needs none.")
