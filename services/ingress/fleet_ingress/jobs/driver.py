"""Which jobs this ingress drives: it takes leases on those nobody drives, and goes on where another stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from fleet_common.bus.port import KvMirror
from fleet_common.clock import Clock
from fleet_common.errors import FleetError
from fleet_common.telemetry.names import IngressMetrics
from fleet_contracts import codec
from fleet_contracts.base import IngressId
from fleet_contracts.jobs import JobLease, JobRecord
from fleet_ingress.core.job_state import FINAL, LinePolicy
from fleet_ingress.jobs.inprocess import InProcess
from fleet_ingress.jobs.run import JobRun
from fleet_ingress.jobs.store import JobStore, is_job_key, lease_key
from fleet_ingress.settings import IngressSettings

log = structlog.get_logger(__name__)

_LOOK_EVERY_S = 1.0
_RENEWALS_PER_LEASE = 3
_PAUSE_AFTER_FAULT_S = 1.0
_GIVE_BACK_S = 2.0


@dataclass(frozen=True, slots=True)
class DriverParts:
    """What a driver stands on. `is_stopping`: the ingress drains, others may have the jobs."""

    ingress_id: IngressId
    store: JobStore
    clock: Clock
    metrics: IngressMetrics
    settings: IngressSettings
    is_stopping: Callable[[], bool]


class JobDriver:
    """Drives up to `job_max_driven` jobs at once; their lines share `job_max_running_lines` places evenly."""

    def __init__(self, parts: DriverParts) -> None:
        self._parts = parts
        self._lease = JobLease(ingress_id=parts.ingress_id)
        self._runs: dict[str, JobRun] = {}
        self._records: dict[str, JobRecord] = {}
        self._wake = asyncio.Event()
        self._mirror: KvMirror | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        settings = parts.settings
        self._policy = LinePolicy(
            max_attempts=settings.job_max_attempts,
            models_known_from_s=parts.clock.monotonic_s() + settings.job_model_grace_s,
        )
        self._started_unix_s = parts.clock.unix_s()

    @asynccontextmanager
    async def running(self, app: InProcess) -> AsyncIterator[None]:
        """Drive jobs while the block runs. Raises BusError when the buckets are not there."""
        self._mirror = await self._parts.store.mirror(self._on_change)
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look_for_ever(group, app))
            try:
                yield
            finally:
                looking.cancel()
                await self._mirror.stop()
                for task in self._tasks:
                    task.cancel()

    def _on_change(self, key: str, value: bytes | None) -> None:
        if not is_job_key(key):
            self._wake.set()
            return
        job_id = key.rpartition(".")[2]
        try:
            record = codec.decode_job_record(value) if value is not None else None
        except codec.DecodeError:
            log.warning("job_record_undecodable", key=key)
            return
        if record is None or record.status in FINAL:
            self._records.pop(job_id, None)
        else:
            self._records[job_id] = record
        run = self._runs.get(job_id)
        if run is not None and record is not None:
            run.saw(record)
        self._wake.set()

    async def _look_for_ever(self, group: asyncio.TaskGroup, app: InProcess) -> None:
        while True:
            self._wake.clear()
            for job_id, record in list(self._records.items()):
                if self._is_free(job_id):
                    # Taken as driven before the lease is asked for, so that no second look asks again.
                    run = self._runs[job_id] = self._new_run(record, app)
                    task = group.create_task(self._drive(job_id, run), name=f"job {job_id}")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _is_free(self, job_id: str) -> bool:
        assert self._mirror is not None
        has_room = not self._parts.is_stopping() and len(self._runs) < self._parts.settings.job_max_driven
        return has_room and job_id not in self._runs and self._mirror.get(lease_key(job_id)) is None

    def _new_run(self, record: JobRecord, app: InProcess) -> JobRun:
        parts = self._parts
        # A job of before this start may ask for models that are still loading; a new one is told as its client is.
        is_older = record.created_unix_s < self._started_unix_s
        policy = self._policy if is_older else LinePolicy(max_attempts=self._policy.max_attempts)
        return JobRun(
            record=record,
            store=parts.store,
            app=app,
            clock=parts.clock,
            policy=policy,
            max_running=lambda: max(1, parts.settings.job_max_running_lines // max(1, len(self._runs))),
            is_stopping=parts.is_stopping,
            on_line=lambda status: parts.metrics.job_lines_total.labels("ok" if status < 400 else "failed").inc(),
        )

    async def _drive(self, job_id: str, run: JobRun) -> None:
        """Hold the lease and run; whatever goes wrong, the job is looked at again."""
        parts = self._parts
        try:
            revision = await parts.store.take_lease(job_id, self._lease, parts.settings.job_lease_s)
            if revision is None:
                # Somebody else was faster; the mirror will tell.
                await parts.clock.sleep(_PAUSE_AFTER_FAULT_S)
                return
            parts.metrics.jobs_driven.set(len(self._runs))
            log.info("job_taken", job_id=job_id, status=run.record.status.value)
            await self._run_under_lease(job_id, run, revision)
        except (FleetError, codec.DecodeError) as err:
            log.warning("job_left", job_id=job_id, error_kind=type(err).__name__, reason=str(err))
            await parts.clock.sleep(_PAUSE_AFTER_FAULT_S)
        finally:
            del self._runs[job_id]
            parts.metrics.jobs_driven.set(len(self._runs))
            self._wake.set()

    async def _run_under_lease(self, job_id: str, run: JobRun, revision: int) -> None:
        """Raises what the run raised, FleetError and DecodeError one by one."""
        work = asyncio.ensure_future(run.run())
        renewal = asyncio.ensure_future(self._renew_for_ever(job_id, revision))
        is_ours = True
        try:
            await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
            is_ours = not renewal.done()
        finally:
            for task in (work, renewal):
                task.cancel()
            await asyncio.wait({work, renewal})
            if is_ours:
                await self._give_back(job_id)
        if work.cancelled():
            log.warning("job_lease_lost", job_id=job_id)
            return
        failure: Exception | None = None
        try:
            work.result()
        except* (FleetError, codec.DecodeError) as errors:
            failure = _first(errors)
        if failure is not None:
            raise failure

    async def _give_back(self, job_id: str) -> None:
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._parts.store.give_back_lease(job_id)
        except (TimeoutError, FleetError) as err:
            # It runs out by itself.
            log.debug("job_lease_not_given_back", job_id=job_id, error_kind=type(err).__name__)

    async def _renew_for_ever(self, job_id: str, revision: int) -> None:
        """Returns when somebody else has the lease."""
        parts, lease_s = self._parts, self._parts.settings.job_lease_s
        while True:
            await parts.clock.sleep(lease_s / _RENEWALS_PER_LEASE)
            try:
                renewed = await parts.store.renew_lease(job_id, self._lease, revision, lease_s)
            except FleetError as err:
                # Outcomes are written once whoever writes them: going on without a lease can only waste work.
                log.warning("job_lease_not_renewed", job_id=job_id, code=err.code)
                continue
            if renewed is None:
                return
            revision = renewed


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Exception)
    return found
