"""Where files and jobs lie: records in buckets, contents in the object store. Every call may raise BusError.

Keys hold the owner, so that a tenant's question can only find what is the tenant's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from fleet_common.bus.port import Bus, KeyValue, KvMirror, ObjectStore
from fleet_common.errors import BusError, RevisionConflictError
from fleet_contracts import codec, subjects
from fleet_contracts.jobs import FileRecord, JobLease, JobRecord, LineOutcome
from fleet_ingress.core.owners import owner_token

log = structlog.get_logger(__name__)

#: Answers above this lie in the object store: a message of the broker holds 1 MiB.
_INLINE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Versioned:
    """A job's record and the revision a change of it must name."""

    record: JobRecord
    revision: int


class JobStore:
    """Files, jobs, outcomes and leases of the whole fleet."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._jobs: KeyValue
        self._lines: KeyValue
        self._objects: ObjectStore

    async def open(self) -> None:
        """Find the buckets. Raises BusError when `fleet bus apply` did not make them."""
        self._jobs = await self._bus.kv(subjects.BUCKET_JOBS)
        self._lines = await self._bus.kv(subjects.BUCKET_LINES)
        self._objects = await self._bus.objects(subjects.OBJECTS_FILES)

    async def mirror(self, on_change: Callable[[str, bytes | None], None]) -> KvMirror:
        """Follow records and leases."""
        return await self._jobs.mirror(on_change)

    async def put_file(self, record: FileRecord, content: bytes, ttl_s: float | None) -> None:
        """Store a file; one of the same id is replaced. Raises QueueFullError when there is no room."""
        await self._objects.put(record.file_id, content, ttl_s)
        await self._jobs.put(_file_key(record.tenant, record.file_id), codec.encode(record), ttl_s)

    async def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """A tenant's file, None when it has none of that id."""
        entry = await self._jobs.get(_file_key(tenant, file_id))
        return codec.decode_file_record(entry.value) if entry is not None else None

    async def files(self, tenant: str) -> list[FileRecord]:
        """All of a tenant's files, the newest last."""
        entries = await self._jobs.entries(f"file.{owner_token(tenant)}")
        found = [codec.decode_file_record(entry.value) for entry in entries.values()]
        return sorted(found, key=lambda record: (record.created_unix_s, record.file_id))

    async def content(self, file_id: str) -> bytes | None:
        """What a file holds, None when it is gone."""
        return await self._objects.get(file_id)

    async def delete_file(self, record: FileRecord) -> None:
        """Forget a file."""
        await self._jobs.delete(_file_key(record.tenant, record.file_id))
        await self._objects.delete(record.file_id)

    async def create_job(self, record: JobRecord, lines: bytes) -> None:
        """Store a job and its own copy of its lines: from here on it will end. Raises QueueFullError."""
        await self._objects.put(_input(record.job_id), lines)
        await self._jobs.create(_job_key(record.tenant, record.job_id), codec.encode(record))

    async def job(self, tenant: str, job_id: str) -> Versioned | None:
        """A tenant's job, None when it has none of that id."""
        entry = await self._jobs.get(_job_key(tenant, job_id))
        return Versioned(codec.decode_job_record(entry.value), entry.revision) if entry is not None else None

    async def jobs(self, tenant: str) -> list[JobRecord]:
        """All of a tenant's jobs, the newest last."""
        entries = await self._jobs.entries(f"job.{owner_token(tenant)}")
        found = [codec.decode_job_record(entry.value) for entry in entries.values()]
        return sorted(found, key=lambda record: (record.created_unix_s, record.job_id))

    async def change_job(self, tenant: str, job_id: str, change: Callable[[JobRecord], JobRecord]) -> JobRecord | None:
        """Apply a pure change by compare-and-set until it holds; the record as it is then, None when it is gone."""
        while True:
            found = await self.job(tenant, job_id)
            if found is None:
                return None
            changed = change(found.record)
            if changed == found.record:
                return changed
            try:
                await self._jobs.update(_job_key(tenant, job_id), codec.encode(changed), found.revision)
            except RevisionConflictError:
                continue
            return changed

    async def lines_of(self, job_id: str) -> bytes | None:
        """The lines of a job as JSONL."""
        return await self._objects.get(_input(job_id))

    async def record_outcome(self, job_id: str, outcome: LineOutcome) -> bool:
        """Store what became of a line. The first outcome stays: False when there was one."""
        stored = outcome
        if len(outcome.body) > _INLINE_BYTES:
            # By request, so that two attempts at one line never share an object.
            name = f"{job_id}.line.{outcome.line}.{outcome.request_id or hashlib.sha256(outcome.body).hexdigest()}"
            await self._objects.put(name, outcome.body)
            stored = msgspec.structs.replace(outcome, body=b"", object_name=name)
        try:
            await self._lines.create(f"{job_id}.{outcome.line}", codec.encode(stored))
        except RevisionConflictError:
            return False
        return True

    async def outcomes(self, job_id: str) -> dict[int, LineOutcome]:
        """Outcomes so far by line number; large bodies are not read."""
        entries = await self._lines.entries(job_id)
        found = [codec.decode_line_outcome(entry.value) for entry in entries.values()]
        return {outcome.line: outcome for outcome in found}

    async def with_body(self, outcome: LineOutcome) -> LineOutcome:
        """An outcome with its body in place. Raises BusError when the body is gone."""
        if not outcome.object_name:
            return outcome
        body = await self._objects.get(outcome.object_name)
        if body is None:
            raise BusError(f"the answer {outcome.object_name} is gone")
        return msgspec.structs.replace(outcome, body=body, object_name="")

    async def keep_result(self, job_id: str, outcome: LineOutcome) -> None:
        """Store the answer of a job of one request."""
        await self._objects.put(_result(job_id), codec.encode(outcome))

    async def result(self, job_id: str) -> LineOutcome | None:
        """The answer of a job of one request, None when there is none."""
        data = await self._objects.get(_result(job_id))
        return codec.decode_line_outcome(data) if data is not None else None

    async def forget_work(self, job_id: str, outcomes: Mapping[int, LineOutcome]) -> None:
        """Remove what only a running job needs."""
        for outcome in outcomes.values():
            if outcome.object_name:
                await self._objects.delete(outcome.object_name)
        await self._lines.purge(job_id)
        await self._objects.delete(_input(job_id))

    async def announce(self, record: JobRecord) -> None:
        """Tell whoever listens that a job is over."""
        await self._bus.publish(subjects.result(record.job_id), codec.encode(record))

    async def take_lease(self, job_id: str, lease: JobLease, lease_s: float) -> int | None:
        """Become the one who drives a job: the lease's revision, None when somebody else is."""
        try:
            return await self._jobs.create(lease_key(job_id), codec.encode(lease), ttl_s=lease_s)
        except RevisionConflictError:
            return None

    async def renew_lease(self, job_id: str, lease: JobLease, revision: int, lease_s: float) -> int | None:
        """Go on driving: the new revision, None when somebody else drives it now."""
        try:
            return await self._jobs.update(lease_key(job_id), codec.encode(lease), revision, ttl_s=lease_s)
        except RevisionConflictError:
            # It may only have run out while the broker was away.
            return await self.take_lease(job_id, lease, lease_s)

    async def give_back_lease(self, job_id: str) -> None:
        """Let another drive the job at once."""
        await self._jobs.delete(lease_key(job_id))


def lease_key(job_id: str) -> str:
    """Key of the lease on a job."""
    return f"lease.{job_id}"


def is_job_key(key: str) -> bool:
    """Whether a key is that of a job's record."""
    return key.startswith("job.")


def _file_key(tenant: str, file_id: str) -> str:
    return f"file.{owner_token(tenant)}.{file_id}"


def _job_key(tenant: str, job_id: str) -> str:
    return f"job.{owner_token(tenant)}.{job_id}"


def _input(job_id: str) -> str:
    return f"{job_id}.input"


def _result(job_id: str) -> str:
    return f"{job_id}.result"
