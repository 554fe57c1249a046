"""The life of a job, without I/O: what its record may become, which line is next, when it is tried again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_contracts.jobs import JobRecord, JobStatus, LineOutcome
from fleet_ingress.core import job_state
from fleet_ingress.core.job_lines import Line, encode_line, make_output, parse_lines
from fleet_ingress.core.job_state import Answer, LinePolicy, LineQueue

CHAT = "/v1/chat/completions"
OK, BAD = Answer(200, b"{}"), Answer(400, b"{}")
FAULT, BUSY = Answer(500, b"{}"), Answer(429, b"{}", retry_after_s=4.0)
NO_MODEL = Answer(404, b'{"error":{"code":"model_not_found"}}')


def lines(count: int) -> list[Line]:
    return [Line(number, f"l{number}", b"{}") for number in range(1, count + 1)]


def record(status: JobStatus = JobStatus.VALIDATING, num_lines: int = 2) -> JobRecord:
    return JobRecord(
        job_id="batch_1",
        kind="batch",
        tenant="acme",
        endpoint=CHAT,
        status=status,
        num_lines=num_lines,
        created_unix_s=1.0,
        expires_unix_s=100.0,
    )


def test_a_job_goes_from_status_to_status_and_remembers_when() -> None:
    started = job_state.start(record(), 2.0)
    over = job_state.lines_over(started, 3.0)
    done = job_state.reach(over, job_state.final_status(over, 2), 4.0)

    assert [started.status, over.status, done.status] == [
        JobStatus.IN_PROGRESS,
        JobStatus.FINALIZING,
        JobStatus.COMPLETED,
    ]
    assert done.reached_unix_s == {"in_progress": 2.0, "finalizing": 3.0, "completed": 4.0}
    assert job_state.reach(done, JobStatus.FAILED, 5.0) is done


def test_a_cancelled_job_is_not_started_and_what_is_finalized_not_cancelled() -> None:
    cancelling = job_state.ask_cancel(record(), 2.0)
    finalizing = record(JobStatus.FINALIZING)

    assert job_state.ask_cancel(cancelling, 3.0) is cancelling
    assert job_state.start(cancelling, 3.0) is cancelling
    assert job_state.lines_over(cancelling, 3.0) is cancelling
    assert job_state.final_status(cancelling, 2) is JobStatus.CANCELLED
    assert job_state.ask_cancel(finalizing, 3.0) is finalizing
    assert job_state.final_status(finalizing, 1) is JobStatus.EXPIRED


def test_no_more_lines_run_than_allowed_and_done_ones_never() -> None:
    queue = LineQueue(lines(4), {2}, LinePolicy())

    started = [queue.next_line(0.0, 2) for _ in range(3)]

    assert [line.number if line else None for line in started] == [1, 3, None]


def test_a_refused_job_waits_longer_each_time_and_no_attempt_is_spent() -> None:
    queue = LineQueue(lines(1), (), LinePolicy(max_attempts=1, min_pause_s=1.0, max_pause_s=6.0))
    waits: list[float] = []
    now_s = 0.0

    for _ in range(5):
        line = queue.next_line(now_s, 1)
        assert line is not None
        assert queue.on_answer(line, BUSY, now_s) is None
        assert queue.next_line(queue.paused_until_s - 0.01, 1) is None
        waits.append(queue.paused_until_s - now_s)
        now_s = queue.paused_until_s

    assert waits == [4.0, 4.0, 4.0, 6.0, 6.0]
    last = queue.next_line(now_s, 1)
    assert last is not None
    assert queue.on_answer(last, OK, now_s) is not None


def test_a_fault_is_the_outcome_after_its_last_attempt() -> None:
    queue = LineQueue(lines(1), (), LinePolicy(max_attempts=3))
    outcomes: list[LineOutcome | None] = []

    for _ in range(3):
        line = queue.next_line(0.0, 1)
        assert line is not None
        outcomes.append(queue.on_answer(line, FAULT, 0.0))

    assert outcomes[:2] == [None, None]
    assert outcomes[2] is not None
    assert outcomes[2].status == 500


def test_a_missing_model_is_waited_for_only_after_a_start() -> None:
    policy = LinePolicy(models_known_from_s=10.0)
    early, late = LineQueue(lines(1), (), policy), LineQueue(lines(1), (), policy)
    (first, second) = early.next_line(0.0, 1), late.next_line(10.0, 1)
    assert first is not None
    assert second is not None

    assert early.on_answer(first, NO_MODEL, 0.0) is None
    assert late.on_answer(second, NO_MODEL, 10.0) is not None


@given(
    answers=st.lists(st.sampled_from([OK, BAD, FAULT, BUSY, NO_MODEL]), max_size=200),
    done=st.sets(st.integers(1, 12)),
    max_running=st.integers(1, 5),
)
def test_every_line_gets_one_outcome_whatever_the_answers(
    answers: list[Answer], done: set[int], max_running: int
) -> None:
    queue = LineQueue(lines(12), done, LinePolicy())
    outcomes: list[int] = sorted(done)
    now_s, feed = 0.0, iter(answers)

    while not queue.is_over:
        now_s = max(now_s, queue.paused_until_s)
        running = []
        while (line := queue.next_line(now_s, max_running)) is not None:
            running.append(line)
        assert len(running) <= max_running
        for line in running:
            outcome = queue.on_answer(line, next(feed, OK), now_s)
            if outcome is not None:
                outcomes.append(outcome.line)
                queue.recorded()

    assert sorted(outcomes) == list(range(1, 13))


def test_lines_survive_being_written_and_read() -> None:
    odd = Line(1, 'ü"\u2028', b'{"a":[1,"\\n"]}')

    assert parse_lines(b"\xef\xbb\xbf" + encode_line(odd, CHAT) + b"\r\n\r\n", CHAT, 9) == [odd]


def test_output_is_in_the_order_of_the_input_with_each_line_once() -> None:
    outcomes = {
        3: LineOutcome(line=3, custom_id="l3", status=200, body=b'{"x":1}', request_id="r3"),
        1: LineOutcome(line=1, custom_id="l1", status=200, body=b"\x00\xff", content_type="audio/wav"),
        2: LineOutcome(line=2, custom_id="l2", status=400, body=b'{"error":{}}'),
    }

    output = make_output("batch_77", lines(4), outcomes, ("batch_expired", "too late"))

    answers, errors = [[json.loads(text) for text in part.splitlines()] for part in (output.answers, output.errors)]
    assert [item["id"] for item in answers + errors] == [f"batch_req_77_{number}" for number in (1, 3, 2, 4)]
    assert answers[0]["response"]["body"] == {"content_type": "audio/wav", "base64": "AP8="}
    assert answers[1]["response"] == {"status_code": 200, "request_id": "r3", "body": {"x": 1}}
    assert errors[0]["response"]["status_code"] == 400
    assert (errors[1]["response"], errors[1]["error"]["code"]) == (None, "batch_expired")
    assert make_output("batch_77", lines(4), {}, None).errors == b""


@pytest.mark.parametrize("number", [1, 1000])
def test_the_line_at_fault_is_named_by_its_place_in_the_file(number: int) -> None:
    good = "".join(f'{{"custom_id":"{n}","method":"POST","url":"{CHAT}","body":{{}}}}\n' for n in range(number - 1))

    with pytest.raises(Exception, match=f"Line {number}:"):
        parse_lines(good.encode() + b"nonsense\n", CHAT, 5000)
