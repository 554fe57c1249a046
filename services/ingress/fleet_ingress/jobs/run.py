"""One job from wherever its record stands to its end: the pure state machine with the I/O around it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import structlog

from fleet_common.clock import Clock
from fleet_common.errors import BusError, FleetError, InvalidInputError
from fleet_contracts.events import Failure
from fleet_contracts.jobs import FileRecord, JobRecord, JobStatus, LineOutcome
from fleet_ingress.api.errors import ErrorEnvelope
from fleet_ingress.core import job_state
from fleet_ingress.core.job_lines import Line, make_output, parse_lines
from fleet_ingress.core.job_state import BATCH, FINAL, LinePolicy, LineQueue
from fleet_ingress.jobs.inprocess import InProcess
from fleet_ingress.jobs.store import JobStore

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Purpose of files that batches make.
OUTPUT_PURPOSE = "batch_output"

_COUNT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.5
_PAUSE_S = 0.5
_EXPIRED = ("batch_expired", "This request was not tried before the batch expired.")
_INPUT_LOST = Failure(
    error_type="server_error", code="input_lost", message="The lines of the job are gone.", status=500
)


@dataclass
class JobRun:
    """What one ingress does for one job while it holds the lease.

    Attributes:
        max_running: how many lines may run right now.
        is_stopping: no new lines any more; the run ends when those that run have ended.
        wake: set when there is news.
    """

    record: JobRecord
    store: JobStore
    app: InProcess
    clock: Clock
    policy: LinePolicy
    max_running: Callable[[], int]
    is_stopping: Callable[[], bool]
    on_line: Callable[[int], None] = lambda status: None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_told_to_end: bool = False
    _expires_unix_s: float = 0.0
    _lines: list[Line] = field(default_factory=list)
    _outcomes: dict[int, LineOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._expires_unix_s = self.record.expires_unix_s

    def saw(self, record: JobRecord) -> None:
        """The record changed, here or elsewhere; it may be older than our own last change."""
        self._expires_unix_s = record.expires_unix_s
        if record.status not in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
            self._is_told_to_end = True
            self.wake.set()

    async def run(self) -> None:
        """Drive the job to its end, or until told to stop. Raises BusError: somebody goes on later."""
        await self._change(job_state.start)
        if self.record.status in FINAL:
            return
        content = await self.store.lines_of(self.record.job_id)
        if content is None:
            await self._fail(_INPUT_LOST)
            return
        try:
            self._lines = await asyncio.to_thread(parse_lines, content, self.record.endpoint, self.record.num_lines)
        except InvalidInputError as err:
            await self._fail(msgspec.structs.replace(_INPUT_LOST, code=err.code, message=str(err)))
            return
        self._outcomes = await self.store.outcomes(self.record.job_id)
        if self.record.status is JobStatus.IN_PROGRESS:
            await self._execute()
            if self.is_stopping() and len(self._outcomes) < len(self._lines):
                return
            await self._change(job_state.lines_over)
        if self.record.status not in FINAL:
            await self._finalize()

    async def _execute(self) -> None:
        """Try lines until all have an outcome, the client cancels, time is up, or this ingress stops."""
        queue = LineQueue(self._lines, self._outcomes.keys(), self.policy)
        async with asyncio.TaskGroup() as group:
            counting = group.create_task(self._count_for_ever())
            running: set[asyncio.Task[None]] = set()
            while not queue.is_over and self._may_go_on(queue):
                self.wake.clear()
                while not self.is_stopping() and (line := self._next_line(queue)) is not None:
                    task = group.create_task(self._try(queue, line))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await self._sleep_until_news(queue)
            for task in list(running):
                task.cancel()
            counting.cancel()
        await self._count()

    def _may_go_on(self, queue: LineQueue) -> bool:
        is_over = self._is_told_to_end or self.clock.unix_s() >= self._expires_unix_s
        return not is_over and not (self.is_stopping() and not queue.num_running)

    def _next_line(self, queue: LineQueue) -> Line | None:
        return queue.next_line(self.clock.monotonic_s(), self.max_running())

    async def _sleep_until_news(self, queue: LineQueue) -> None:
        pause_s = queue.paused_until_s - self.clock.monotonic_s()
        try:
            async with asyncio.timeout(min(pause_s, _LOOK_EVERY_S) if pause_s > 0 else _LOOK_EVERY_S):
                await self.wake.wait()
        except TimeoutError:
            pass

    async def _try(self, queue: LineQueue, line: Line) -> None:
        answer = await self.app.post(self.record.endpoint, line.body, self.record.tenant)
        outcome = queue.on_answer(line, answer, self.clock.monotonic_s())
        if outcome is not None:
            await self._patiently(lambda: self.store.record_outcome(self.record.job_id, outcome))
            self._outcomes[line.number] = outcome
            self.on_line(outcome.status)
            queue.recorded()
        self.wake.set()

    async def _count_for_ever(self) -> None:
        while True:
            await self.clock.sleep(_COUNT_EVERY_S)
            await self._count()

    async def _count(self) -> None:
        num_failed = sum(outcome.status >= 400 for outcome in self._outcomes.values())
        num_done = len(self._outcomes) - num_failed
        await self._patiently(lambda: self._change(lambda record, _: job_state.counted(record, num_done, num_failed)))

    async def _finalize(self) -> None:
        """Write the results, then the final status; done again from the start when somebody died on the way."""
        record = self.record
        # What another ingress recorded first is the outcome, not what this one heard.
        stored = await self.store.outcomes(record.job_id)
        whole = {number: await self.store.with_body(outcome) for number, outcome in stored.items()}
        status = job_state.final_status(record, len(whole))
        num_failed = sum(outcome.status >= 400 for outcome in whole.values())
        counted = job_state.counted(record, len(whole) - num_failed, num_failed)
        if record.kind == BATCH:
            ended = await self._write_files(counted, status, whole)
        else:
            status, ended = await self._write_result(counted, status, whole)

        def end(_: JobRecord, now_unix_s: float) -> JobRecord:
            return job_state.reach(ended, status, now_unix_s)

        await self._change(end)
        log.info(
            "job_finished",
            job_id=record.job_id,
            status=self.record.status.value,
            num_lines=record.num_lines,
            num_done=self.record.num_done,
            num_failed=self.record.num_failed,
        )
        await self.store.announce(self.record)
        await self.store.forget_work(record.job_id, stored)

    async def _write_files(self, record: JobRecord, status: JobStatus, outcomes: dict[int, LineOutcome]) -> JobRecord:
        missing = _EXPIRED if status is JobStatus.EXPIRED else None
        output = await asyncio.to_thread(make_output, record.job_id, self._lines, outcomes, missing)
        return msgspec.structs.replace(
            record,
            output_file_id=await self._write_file(record, "output", output.answers),
            error_file_id=await self._write_file(record, "error", output.errors),
        )

    async def _write_file(self, record: JobRecord, name: str, content: bytes) -> str:
        """Its id follows from the job's: written twice it is still one file. "" for no content."""
        if not content:
            return ""
        file_id = f"file-{record.job_id.partition('_')[2]}-{name}"
        made = FileRecord(
            file_id=file_id,
            tenant=record.tenant,
            filename=f"{record.job_id}_{name}.jsonl",
            purpose=OUTPUT_PURPOSE,
            num_bytes=len(content),
            created_unix_s=self.clock.unix_s(),
        )
        await self.store.put_file(made, content, None)
        return file_id

    async def _write_result(
        self, record: JobRecord, status: JobStatus, outcomes: dict[int, LineOutcome]
    ) -> tuple[JobStatus, JobRecord]:
        """A job of one request: it fails as its request does."""
        outcome = outcomes.get(1)
        if outcome is None:
            return status, record
        await self.store.keep_result(record.job_id, outcome)
        if outcome.status < 400:
            return JobStatus.COMPLETED, record
        return JobStatus.FAILED, msgspec.structs.replace(record, failure=_failure_of(outcome))

    async def _fail(self, failure: Failure) -> None:
        await self._change(lambda record, now_s: job_state.reach(record, JobStatus.FAILED, now_s, failure))
        log.error("job_failed", job_id=self.record.job_id, code=failure.code)
        await self.store.announce(self.record)

    async def _change(self, change: Callable[[JobRecord, float], JobRecord]) -> None:
        """Change the record wherever it stands now. Raises JobGoneError when it was deleted."""
        changed = await self.store.change_job(
            self.record.tenant, self.record.job_id, lambda record: change(record, self.clock.unix_s())
        )
        if changed is None:
            raise JobGoneError(f"the job {self.record.job_id} is gone")
        self.record = changed

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """An answer is worth waiting for the broker."""
        while True:
            try:
                return await call()
            except BusError as err:
                log.warning("job_store_away", job_id=self.record.job_id, code=err.code)
                await self.clock.sleep(_PAUSE_S)


def _failure_of(outcome: LineOutcome) -> Failure:
    """The error a route answered with, as a record keeps it."""
    error = msgspec.json.decode(outcome.body, type=ErrorEnvelope).error
    return Failure(
        error_type=error.type, code=error.code or "", message=error.message, status=outcome.status, param=error.param
    )


class JobGoneError(FleetError):
    """The job's record was deleted or has expired."""

    code = "job_gone"
