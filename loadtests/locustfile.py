"""Chat under load, with the time to first token as its own row (the built-in row stops at the headers).

locust -f loadtests/locustfile.py --headless -u 8 -r 8 -t 30s -H http://127.0.0.1:8080
FLEET_LOAD_TTFT_P95_MS=2000 makes the run fail when the gate is missed.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import msgspec
from locust import HttpUser, between, events, task

MODEL = os.environ.get("FLEET_LOAD_MODEL", "omnifleet-vlm")
TTFT_P95_MS = float(os.environ.get("FLEET_LOAD_TTFT_P95_MS", "0"))


class ChatUser(HttpUser):
    """A client that streams short answers."""

    wait_time = between(0.1, 0.5)

    @task
    def stream_chat(self) -> None:
        """One streamed chat; an error event or a missing [DONE] fails it."""
        prompt = f"Say something about the number {random.randrange(10_000)}."
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "stream": True}
        started_s = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="chat (headers)"
        ) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            error = self._read(response, started_s)
            if error:
                response.failure(error)
            else:
                response.success()

    def _read(self, response: Any, started_s: float) -> str:
        """Read the stream and report TTFT, ITL and E2E; returns what went wrong, if anything."""
        previous_s = 0.0
        for line in response.iter_lines(chunk_size=1):
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            now_s = time.perf_counter()
            if payload == b"[DONE]":
                self._report("E2E", now_s - started_s)
                return ""
            chunk = msgspec.json.decode(payload)
            if "error" in chunk:
                return str(chunk["error"]["message"])
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                self._report("ITL" if previous_s else "TTFT", now_s - (previous_s or started_s))
                previous_s = now_s
        return "the stream ended without [DONE]"

    def _report(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="METRIC",
            name=name,
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={},
        )


@events.quitting.add_listener
def gate(environment: Any, **_: Any) -> None:
    """Fail the run when requests failed or the TTFT gate was missed."""
    p95_ms = environment.stats.get("TTFT", "METRIC").get_response_time_percentile(0.95)
    if environment.stats.total.num_failures or (TTFT_P95_MS and p95_ms > TTFT_P95_MS):
        environment.process_exit_code = 1
