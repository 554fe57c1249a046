"""REQUIREMENTS A8: a batch survives the death of every service, an empty store and a restart of the whole stack."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fleet_cli.testing import RunningFleet, running_fleet
from tests.support.stack import flush_store

pytestmark = pytest.mark.e2e

MODEL = "omnifleet-vlm"
NUM_LINES = 50
#: With 16 lines at once the batch takes some seconds.
SCRIPTED = {
    "FLEET_ENGINE": "scripted",
    "FLEET_DECODE_ENGINE_ARGS": json.dumps({"token_delay_s": 0.1}),
    "FLEET_INGRESS_JOB_MODEL_GRACE_S": "20",
}
BAD: dict[int, dict[str, Any]] = {7: {"temperature": 5}, 23: {"messages": []}, 41: {"no_such_field": 1}}
SERVERS = ("nats-server", "valkey-server")
ENDPOINT = "/v1/chat/completions"


def bodies() -> list[dict[str, Any]]:
    """What the lines ask, three of them wrongly."""
    return [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Question {number}?"}],
            "max_tokens": 12,
            **BAD.get(number, {}),
        }
        for number in range(NUM_LINES)
    ]


def start_batch(client: openai.OpenAI) -> openai.types.Batch:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        for number, body in enumerate(bodies())
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def wait_for_batch(
    client: openai.OpenAI, batch_id: str, num_lines: int, timeout_s: float = 120.0
) -> openai.types.Batch:
    """Until that many lines have an outcome, or the batch is over."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            batch = client.batches.retrieve(batch_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(0.2)
            continue
        counts = batch.request_counts
        assert counts is not None
        if counts.completed + counts.failed >= num_lines and (num_lines < NUM_LINES or batch.completed_at):
            return batch
        time.sleep(0.1)
    raise TimeoutError(f"{batch_id} has not {num_lines} outcomes")


def kill_services(fleet: RunningFleet) -> int:
    """SIGKILL to every process of the stack but the broker and the store; how many there were."""
    pids = [entry["pid"] for name, entry in fleet.stack()["processes"].items() if name not in SERVERS]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def assert_every_line_once(client: openai.OpenAI, batch: openai.types.Batch, url: str) -> None:
    """47 answers and 3 errors, each line once, in order, and the errors are those of the route."""
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers, errors = (
        [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
        for file_id in (batch.output_file_id, batch.error_file_id)
    )
    assert [item["custom_id"] for item in answers] == [f"line-{n}" for n in range(NUM_LINES) if n not in BAD]
    assert set(Counter(item["custom_id"] for item in answers + errors).values()) == {1}
    assert all(item["response"]["body"]["choices"][0]["message"]["content"] for item in answers)
    online = [httpx.post(f"{url}{ENDPOINT}", json=bodies()[number], timeout=30) for number in BAD]
    assert [(item["response"]["status_code"], item["response"]["body"]) for item in errors] == [
        (answer.status_code, answer.json()) for answer in online
    ]


def client_of(fleet: RunningFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_a_batch_survives_every_service_and_an_empty_store(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet", SCRIPTED, timeout_s=90.0) as fleet, client_of(fleet) as client:
        batch = start_batch(client)
        half = wait_for_batch(client, batch.id, NUM_LINES // 3)
        num_killed = kill_services(fleet)
        flush_store(fleet)
        done = wait_for_batch(client, batch.id, NUM_LINES)

        assert num_killed >= 5
        assert half.status == "in_progress"
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES - len(BAD), len(BAD))
        assert_every_line_once(client, done, fleet.url)


def test_a_batch_and_its_files_survive_a_restart_of_the_whole_stack(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet", SCRIPTED, timeout_s=90.0) as fleet, client_of(fleet) as client:
        batch = start_batch(client)
        wait_for_batch(client, batch.id, NUM_LINES // 3)
    with running_fleet(tmp_path / "fleet", SCRIPTED, timeout_s=90.0) as fleet, client_of(fleet) as client:
        done = wait_for_batch(client, batch.id, NUM_LINES)
        files = {file.purpose for file in client.files.list()}

        assert done.status == "completed"
        assert files == {"batch", "batch_output"}
        assert_every_line_once(client, done, fleet.url)
