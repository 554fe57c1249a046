"""`/v1/files`, `/v1/batches`, `/v1/jobs`: requests and answers; the first two in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from fleet_ingress.api.errors import ErrorBody

_Metadata = dict[
    Annotated[str, msgspec.Meta(max_length=64)],
    Annotated[str, msgspec.Meta(max_length=512)],
]
Metadata = Annotated[_Metadata, msgspec.Meta(max_length=16)]


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `expires_at`: unix seconds; None when only the server's own limit holds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A file is no more."""

    id: str
    object: str = "file"
    deleted: bool = True


class FileUpload(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `multipart/form-data` upload.

    Attributes:
        file: the content, with its file name.
        purpose: `batch` for what a batch reads.
    """

    file: bytes
    purpose: str


class CreateBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/batches`.

    Attributes:
        input_file_id: a file of purpose `batch`: one request per line.
        endpoint: the route all lines go to.
        completion_window: lines not tried by then are not tried.
    """

    input_file_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    endpoint: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """All reasons."""

    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a job; the counts are at most some seconds old while it runs."""

    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; times in unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches."""

    object: str = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class CreateJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/jobs`: one request that outlives every service.

    Attributes:
        endpoint: the route it goes to.
        body: what would be sent there.
    """

    endpoint: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    body: dict[str, Any]
    metadata: Metadata | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A durable job; times in unix seconds.

    Attributes:
        status: `validating` (nobody has taken it yet), `in_progress`, `finalizing`, `completed`, `failed`, `expired`,
            `cancelling`, `cancelled`.
        error: what the request was answered, when that was an error. `GET /v1/jobs/{id}/result` gives it as it was.
        has_result: the result can be read.
    """

    id: str
    object: str = "job"
    endpoint: str
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    ended_at: int | None = None
    progress: RequestCounts
    has_result: bool = False
    error: ErrorBody | None = None
    metadata: dict[str, str] | None = None


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs."""

    object: str = "list"
    data: list[Job]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
