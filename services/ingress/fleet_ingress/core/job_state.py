"""The life of a durable job: what its record may become, and which line is tried next. Pure.

    validating ──► in_progress ──► finalizing ──► completed | failed | expired
         └──────────────┴──► cancelling ──► cancelled

A line is pending, then runs, then has an outcome that is written once. Refusals (429, 503) are no attempt: the job
waits. A fault of the server is tried again a few times. Everything else is the outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from fleet_contracts.events import Failure
from fleet_contracts.jobs import JobRecord, JobStatus, LineOutcome
from fleet_ingress.core.job_lines import Line

#: Kinds of jobs: made of a file, and of one request.
BATCH = "batch"
JOB = "job"
#: A job in one of these changes no more.
FINAL = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED})
_STOPPABLE = frozenset({JobStatus.VALIDATING, JobStatus.IN_PROGRESS})
_REFUSALS = frozenset({429, 503})
_MODEL_NOT_FOUND = b'"code":"model_not_found"'


def reach(record: JobRecord, status: JobStatus, now_unix_s: float, failure: Failure | None = None) -> JobRecord:
    """The record at another status; a final one stays as it is."""
    if record.status in FINAL or record.status is status:
        return record
    reached = {**record.reached_unix_s, status.value: now_unix_s}
    return msgspec.structs.replace(record, status=status, reached_unix_s=reached, failure=failure or record.failure)


def start(record: JobRecord, now_unix_s: float) -> JobRecord:
    """Somebody drives it now."""
    return reach(record, JobStatus.IN_PROGRESS, now_unix_s) if record.status is JobStatus.VALIDATING else record


def ask_cancel(record: JobRecord, now_unix_s: float) -> JobRecord:
    """The client wants it to stop; what is being finalized or over stays as it is."""
    return reach(record, JobStatus.CANCELLING, now_unix_s) if record.status in _STOPPABLE else record


def lines_over(record: JobRecord, now_unix_s: float) -> JobRecord:
    """No line will be tried any more, unless the client cancelled meanwhile."""
    return reach(record, JobStatus.FINALIZING, now_unix_s) if record.status is JobStatus.IN_PROGRESS else record


def counted(record: JobRecord, num_done: int, num_failed: int) -> JobRecord:
    """The record with other counts."""
    if record.status in FINAL or (record.num_done, record.num_failed) == (num_done, num_failed):
        return record
    return msgspec.structs.replace(record, num_done=num_done, num_failed=num_failed)


def final_status(record: JobRecord, num_outcomes: int) -> JobStatus:
    """What a batch that is finalized becomes."""
    if record.status is JobStatus.CANCELLING:
        return JobStatus.CANCELLED
    return JobStatus.COMPLETED if num_outcomes >= record.num_lines else JobStatus.EXPIRED


@dataclass(frozen=True, slots=True)
class Answer:
    """What the route said to a line.

    Attributes:
        retry_after_s: when trying again makes sense, where it said so.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    request_id: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinePolicy:
    """When a line is tried again.

    Attributes:
        max_attempts: answers of 5xx other than refusals, the last of which is the outcome.
        min_pause_s, max_pause_s: of a job that was refused; doubled with each refusal in a row.
        models_known_from_s: a model that is not found before that may still be loading (monotonic seconds).
    """

    max_attempts: int = 3
    min_pause_s: float = 0.5
    max_pause_s: float = 10.0
    models_known_from_s: float = 0.0


@dataclass(slots=True)
class LineQueue:
    """Which line of a job comes next; every `now_s` is monotonic seconds of one clock."""

    lines: Sequence[Line]
    done: Collection[int]
    policy: LinePolicy
    num_running: int = 0
    paused_until_s: float = 0.0
    _pending: deque[Line] = field(default_factory=deque)
    _attempts: dict[int, int] = field(default_factory=dict)
    _num_refusals: int = 0

    def __post_init__(self) -> None:
        done = frozenset(self.done)
        self._pending = deque(line for line in self.lines if line.number not in done)

    @property
    def is_over(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._pending and not self.num_running

    def next_line(self, now_s: float, max_running: int) -> Line | None:
        """The line to try now, which then runs; None when there is none, or no room, or the job is paused."""
        if not self._pending or self.num_running >= max_running or now_s < self.paused_until_s:
            return None
        self.num_running += 1
        return self._pending.popleft()

    def on_answer(self, line: Line, answer: Answer, now_s: float) -> LineOutcome | None:
        """A line that ran was answered: its outcome, or None when it will be tried again.

        A line with an outcome runs until `recorded`: it must be stored first.
        """
        if self._is_refusal(answer, now_s):
            self._refused(answer, now_s)
        elif answer.status < 500 or self._num_attempts(line) >= self.policy.max_attempts:
            self._num_refusals = 0
            return LineOutcome(
                line=line.number,
                custom_id=line.custom_id,
                status=answer.status,
                content_type=answer.content_type,
                request_id=answer.request_id,
                body=answer.body,
            )
        self.num_running -= 1
        self._pending.append(line)
        return None

    def recorded(self) -> None:
        """The outcome of a line is stored."""
        self.num_running -= 1

    def _num_attempts(self, line: Line) -> int:
        self._attempts[line.number] = self._attempts.get(line.number, 0) + 1
        return self._attempts[line.number]

    def _is_refusal(self, answer: Answer, now_s: float) -> bool:
        is_early = now_s < self.policy.models_known_from_s
        return answer.status in _REFUSALS or (is_early and answer.status == 404 and _MODEL_NOT_FOUND in answer.body)

    def _refused(self, answer: Answer, now_s: float) -> None:
        pause_s = min(self.policy.max_pause_s, self.policy.min_pause_s * 2.0**self._num_refusals)
        self._num_refusals = min(self._num_refusals + 1, 16)
        self.paused_until_s = max(self.paused_until_s, now_s + max(pause_s, answer.retry_after_s or 0.0))
