"""What clients do with files and jobs; every question is about the asking tenant's own."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass, field

import structlog

from fleet_common.clock import Clock
from fleet_common.errors import AdmissionRejectedError, InvalidInputError, QueueFullError
from fleet_contracts.jobs import FileRecord, JobRecord, JobStatus, LineOutcome
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.api.jobs import CreateBatch, CreateJob
from fleet_ingress.core import job_state
from fleet_ingress.core.job_lines import Line, encode_line, parse_lines
from fleet_ingress.core.job_state import BATCH, FINAL, JOB
from fleet_ingress.errors import INVALID_REQUEST, NOT_FOUND, ApiError, by_status
from fleet_ingress.jobs.store import JobStore
from fleet_ingress.settings import IngressSettings

log = structlog.get_logger(__name__)

#: `batch` files are read by batches; the others are only kept.
PURPOSES = ("batch", "user_data", "vision")

_WINDOW_S = 24 * 3600.0
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MIN_EXPIRY_S, _MAX_EXPIRY_S = 3600, 2_592_000
_MAX_FILENAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as it came. `expires_after_s`: seconds to live, None for as long as the server keeps files."""

    filename: str
    purpose: str
    content: bytes
    expires_after_s: int | None = None


@dataclass
class JobDesk:
    """Files and jobs of all tenants. `endpoints`: routes whose requests can be jobs, known once routes are made."""

    store: JobStore
    clock: Clock
    settings: IngressSettings
    endpoints: tuple[str, ...] = field(default=())

    async def add_file(self, tenant: str, upload: Upload) -> FileRecord:
        """Keep a file. Raises ApiError, InvalidInputError, AdmissionRejectedError (no room)."""
        limit_bytes = self.settings.max_file_bytes
        if len(upload.content) > limit_bytes:
            raise by_status(413, f"The file is larger than {limit_bytes} bytes.")
        if upload.purpose not in PURPOSES:
            raise InvalidInputError(
                f"`purpose` must be one of {', '.join(PURPOSES)}.", param="purpose", code="invalid_value"
            )
        if not upload.content:
            raise InvalidInputError("The file is empty.", param="file", code="empty_file")
        await self._check_room(tenant, len(upload.content))
        now_s = self.clock.unix_s()
        record = FileRecord(
            file_id=f"file-{secrets.token_hex(12)}",
            tenant=tenant,
            filename=upload.filename[:_MAX_FILENAME_CHARS] or "file",
            purpose=upload.purpose,
            num_bytes=len(upload.content),
            created_unix_s=now_s,
            expires_unix_s=now_s + upload.expires_after_s if upload.expires_after_s is not None else None,
        )
        try:
            await self.store.put_file(record, upload.content, upload.expires_after_s)
        except QueueFullError as err:
            raise AdmissionRejectedError("There is no room for files; delete some.", retry_after_s=60.0) from err
        log.info("file_added", file_id=record.file_id, tenant=tenant, num_bytes=record.num_bytes)
        return record

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file of this tenant. Raises ApiError (404), the same for another's as for none."""
        record = await self.store.file(tenant, file_id) if _ID.fullmatch(file_id) else None
        if record is None:
            raise _not_found("file", file_id)
        return record

    async def files(self, tenant: str, purpose: str | None = None) -> list[FileRecord]:
        """Files of this tenant, oldest first."""
        return [record for record in await self.store.files(tenant) if purpose in (None, record.purpose)]

    async def content(self, tenant: str, file_id: str) -> tuple[FileRecord, bytes]:
        """A file and what it holds. Raises ApiError (404)."""
        record = await self.file(tenant, file_id)
        content = await self.store.content(file_id)
        if content is None:
            raise _not_found("file", file_id)
        return record, content

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget a file; a batch made of it goes on from its own copy. Raises ApiError (404)."""
        await self.store.delete_file(await self.file(tenant, file_id))

    async def create_batch(self, tenant: str, wanted: CreateBatch) -> JobRecord:
        """Check every line and accept the batch. Raises ApiError (404), InvalidInputError, AdmissionRejectedError."""
        self._check_endpoint(wanted.endpoint)
        record = await self.store.file(tenant, wanted.input_file_id) if _ID.fullmatch(wanted.input_file_id) else None
        if record is None:
            raise _not_found("file", wanted.input_file_id, "input_file_id")
        if record.purpose != BATCH:
            raise InvalidInputError(
                f"The file is for `{record.purpose}`, not for `batch`.", param="input_file_id", code="invalid_purpose"
            )
        _, content = await self.content(tenant, wanted.input_file_id)
        lines = await asyncio.to_thread(parse_lines, content, wanted.endpoint, self.settings.max_job_lines)
        now_s = self.clock.unix_s()
        job = JobRecord(
            job_id=f"batch_{secrets.token_hex(12)}",
            kind=BATCH,
            tenant=tenant,
            endpoint=wanted.endpoint,
            status=JobStatus.VALIDATING,
            num_lines=len(lines),
            created_unix_s=now_s,
            expires_unix_s=now_s + _WINDOW_S,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            metadata=wanted.metadata,
        )
        return await self._accept(job, content)

    async def create_job(self, tenant: str, wanted: CreateJob, body: bytes) -> JobRecord:
        """Accept one request as a job. Raises InvalidInputError, AdmissionRejectedError.

        Args:
            body: JSON of the request.
        """
        self._check_endpoint(wanted.endpoint)
        now_s = self.clock.unix_s()
        job = JobRecord(
            job_id=f"job_{secrets.token_hex(12)}",
            kind=JOB,
            tenant=tenant,
            endpoint=wanted.endpoint,
            status=JobStatus.VALIDATING,
            num_lines=1,
            created_unix_s=now_s,
            expires_unix_s=now_s + _WINDOW_S,
            metadata=wanted.metadata,
        )
        return await self._accept(job, encode_line(Line(1, JOB, body), wanted.endpoint))

    async def job(self, tenant: str, job_id: str, kind: str) -> JobRecord:
        """A job of this tenant. Raises ApiError (404), the same for another's as for none."""
        found = await self.store.job(tenant, job_id) if _ID.fullmatch(job_id) else None
        if found is None or found.record.kind != kind:
            raise _not_found(kind, job_id)
        return found.record

    async def jobs(self, tenant: str, kind: str) -> list[JobRecord]:
        """Jobs of this tenant, oldest first."""
        return [record for record in await self.store.jobs(tenant) if record.kind == kind]

    async def cancel(self, tenant: str, job_id: str, kind: str) -> JobRecord:
        """Stop a job; again is no error. Raises ApiError (404; 409 when it ended otherwise)."""
        await self.job(tenant, job_id, kind)
        now_s = self.clock.unix_s()
        changed = await self.store.change_job(tenant, job_id, lambda record: job_state.ask_cancel(record, now_s))
        if changed is None:
            raise _not_found(kind, job_id)
        if changed.status not in (JobStatus.CANCELLING, JobStatus.CANCELLED):
            message = f"It is {changed.status.value.replace('_', ' ')}: there is nothing to cancel any more."
            raise ApiError(409, ErrorBody(message=message, type=INVALID_REQUEST, code=f"{kind}_not_cancellable"))
        return changed

    async def result(self, tenant: str, job_id: str) -> LineOutcome:
        """The answer of a job. Raises ApiError (404; 409 while it runs, and when it ended without one)."""
        record = await self.job(tenant, job_id, JOB)
        outcome = await self.store.result(job_id) if record.status in FINAL else None
        if outcome is None:
            message = f"The job has no result: it is {record.status.value.replace('_', ' ')}."
            raise ApiError(409, ErrorBody(message=message, type=INVALID_REQUEST, code="job_has_no_result"))
        return outcome

    async def _accept(self, job: JobRecord, lines: bytes) -> JobRecord:
        running = [record for record in await self.store.jobs(job.tenant) if record.status not in FINAL]
        if len(running) >= self.settings.max_open_jobs_per_tenant:
            message = f"{len(running)} jobs are open, which is the limit; wait for one, or cancel it."
            raise AdmissionRejectedError(message, retry_after_s=10.0)
        try:
            await self.store.create_job(job, lines)
        except QueueFullError as err:
            raise AdmissionRejectedError("There is no room for jobs; delete files.", retry_after_s=60.0) from err
        log.info("job_accepted", job_id=job.job_id, tenant=job.tenant, num_lines=job.num_lines)
        return job

    async def _check_room(self, tenant: str, num_bytes: int) -> None:
        held = await self.store.files(tenant)
        settings = self.settings
        if len(held) >= settings.max_files_per_tenant:
            raise AdmissionRejectedError(
                f"{len(held)} files are kept, which is the limit; delete some.", retry_after_s=60.0
            )
        if sum(record.num_bytes for record in held) + num_bytes > settings.max_file_bytes_per_tenant:
            limit_bytes = settings.max_file_bytes_per_tenant
            raise AdmissionRejectedError(
                f"The files would be more than {limit_bytes} bytes together; delete some.", retry_after_s=60.0
            )

    def _check_endpoint(self, endpoint: str) -> None:
        if endpoint not in self.endpoints:
            raise InvalidInputError(
                f"`endpoint` must be one of {', '.join(self.endpoints)}.", param="endpoint", code="invalid_endpoint"
            )


def parse_expiry(anchor: str | None, seconds: str | None) -> int | None:
    """`expires_after` of an upload, in seconds. Raises InvalidInputError."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidInputError(
            "`expires_after[anchor]` must be created_at.", param="expires_after[anchor]", code="invalid_value"
        )
    text = seconds or ""
    if not (text.isascii() and text.isdigit()) or not _MIN_EXPIRY_S <= int(text) <= _MAX_EXPIRY_S:
        raise InvalidInputError(
            f"`expires_after[seconds]` must be {_MIN_EXPIRY_S} to {_MAX_EXPIRY_S}.",
            param="expires_after[seconds]",
            code="invalid_value",
        )
    return int(text)


def _not_found(kind: str, wanted_id: str, param: str = "id") -> ApiError:
    shown = wanted_id if len(wanted_id) <= 100 else wanted_id[:100] + "..."
    return ApiError(
        404, ErrorBody(message=f"No such {kind}: {shown}.", type=NOT_FOUND, param=param, code=f"{kind}_not_found")
    )
