"""Records as clients see them, and pages of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fleet_common.errors import InvalidInputError
from fleet_contracts.jobs import FileRecord, JobRecord, JobStatus
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.api.jobs import Batch, BatchError, BatchErrors, FileObject, Job, RequestCounts
from fleet_ingress.core.job_state import FINAL

MAX_PAGE = 10_000
DEFAULT_FILES_PAGE = 10_000
DEFAULT_JOBS_PAGE = 20


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


ItemT = TypeVar("ItemT", bound=_Identified)


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list. `after`: the id the page begins behind, "" = from the start."""

    limit: int
    after: str = ""
    is_ascending: bool = False


def parse_page(limit: str | None, after: str | None, order: str | None, default_limit: int) -> PageQuery:
    """The query of a list. Raises InvalidInputError."""
    number = default_limit
    if limit is not None:
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidInputError(f"`limit` must be 1 to {MAX_PAGE}.", param="limit", code="invalid_value")
        number = int(limit)
    if order not in (None, "asc", "desc"):
        raise InvalidInputError("`order` must be asc or desc.", param="order", code="invalid_value")
    return PageQuery(number, after or "", order == "asc")


def take_page(items: Sequence[ItemT], query: PageQuery) -> tuple[list[ItemT], bool]:
    """The page of items given oldest first, and whether more come. Raises InvalidInputError for an unknown `after`."""
    ordered = list(items) if query.is_ascending else list(reversed(items))
    start = 0
    if query.after:
        start = next((number for number, item in enumerate(ordered, start=1) if item.id == query.after), 0)
        if not start:
            raise InvalidInputError("`after` is no id of this list.", param="after", code="invalid_value")
    return ordered[start : start + query.limit], len(ordered) > start + query.limit


def show_file(record: FileRecord) -> FileObject:
    """A file for its owner."""
    return FileObject(
        id=record.file_id,
        bytes=record.num_bytes,
        created_at=int(record.created_unix_s),
        expires_at=_whole(record.expires_unix_s),
        filename=record.filename,
        purpose=record.purpose,
    )


def show_batch(record: JobRecord) -> Batch:
    """A batch for its owner."""
    failure = record.failure
    return Batch(
        id=record.job_id,
        endpoint=record.endpoint,
        errors=BatchErrors(data=[BatchError(code=failure.code, message=failure.message)]) if failure else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status.value,
        output_file_id=record.output_file_id or None,
        error_file_id=record.error_file_id or None,
        created_at=int(record.created_unix_s),
        in_progress_at=_reached(record, JobStatus.IN_PROGRESS),
        expires_at=int(record.expires_unix_s),
        finalizing_at=_reached(record, JobStatus.FINALIZING),
        completed_at=_reached(record, JobStatus.COMPLETED),
        failed_at=_reached(record, JobStatus.FAILED),
        expired_at=_reached(record, JobStatus.EXPIRED),
        cancelling_at=_reached(record, JobStatus.CANCELLING),
        cancelled_at=_reached(record, JobStatus.CANCELLED),
        request_counts=_counts(record),
        metadata=record.metadata,
    )


def show_job(record: JobRecord) -> Job:
    """A job of one request for its owner."""
    failure = record.failure
    is_over = record.status in FINAL
    return Job(
        id=record.job_id,
        endpoint=record.endpoint,
        status=record.status.value,
        created_at=int(record.created_unix_s),
        expires_at=int(record.expires_unix_s),
        in_progress_at=_reached(record, JobStatus.IN_PROGRESS),
        ended_at=_reached(record, record.status) if is_over else None,
        progress=_counts(record),
        has_result=is_over and record.num_done + record.num_failed > 0,
        error=None
        if failure is None
        else ErrorBody(message=failure.message, type=failure.error_type, param=failure.param, code=failure.code),
        metadata=record.metadata,
    )


def _counts(record: JobRecord) -> RequestCounts:
    return RequestCounts(total=record.num_lines, completed=record.num_done, failed=record.num_failed)


def _reached(record: JobRecord, status: JobStatus) -> int | None:
    return _whole(record.reached_unix_s.get(status.value))


def _whole(unix_s: float | None) -> int | None:
    return None if unix_s is None else int(unix_s)
