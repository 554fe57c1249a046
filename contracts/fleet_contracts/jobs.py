"""Durable jobs and files: records in buckets that outlive every service; contents lie in the object store."""

from __future__ import annotations

from enum import StrEnum

from fleet_contracts.base import Contract
from fleet_contracts.events import Failure


class JobStatus(StrEnum):
    """Where a job stands; the values are those of OpenAI's batches."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class FileRecord(Contract, frozen=True, kw_only=True, tag="file_record.v1"):
    """A file of a tenant; its content is the object of the same name.

    Attributes:
        purpose: what it may be used for, like `batch`; `batch_output` when a batch made it.
        expires_unix_s: None: when the bucket lets it go.
    """

    file_id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_unix_s: float
    expires_unix_s: float | None = None


class JobRecord(Contract, frozen=True, kw_only=True, tag="job_record.v1"):
    """A durable job: lines of requests to one endpoint. Changed by compare-and-set only.

    Attributes:
        kind: `batch` (made of a file, answers into files) or `job` (one request).
        endpoint: path of the route that every line goes to.
        num_done, num_failed: lines with an answer, and with an error, when last counted.
        expires_unix_s: lines without an outcome by then get none.
        reached_unix_s: when each status was reached.
        failure: why the whole job failed.
    """

    job_id: str
    kind: str
    tenant: str
    endpoint: str
    status: JobStatus
    num_lines: int
    created_unix_s: float
    expires_unix_s: float
    num_done: int = 0
    num_failed: int = 0
    input_file_id: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    completion_window: str = ""
    metadata: dict[str, str] | None = None
    reached_unix_s: dict[str, float] = {}
    failure: Failure | None = None


class LineOutcome(Contract, frozen=True, kw_only=True, tag="line_outcome.v1"):
    """What became of one line of a job; written once.

    Attributes:
        line: from 1.
        status: of the HTTP answer the same request gets online.
        content_type: of the answer's body.
        object_name: where the body lies when it is too large for a message; "" = it is `body`.
    """

    line: int
    custom_id: str
    status: int
    content_type: str = "application/json"
    request_id: str = ""
    body: bytes = b""
    object_name: str = ""


class JobLease(Contract, frozen=True, kw_only=True, tag="job_lease.v1"):
    """Who drives a job right now; the key's TTL is the lease."""

    ingress_id: str
