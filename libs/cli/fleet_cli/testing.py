"""Run a whole fleet (`fleet up`) around a block of a test or a benchmark. Not for production."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fleet_common.testing.servers import free_port


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """A fleet that answered ready.

    Attributes:
        url: base URL of the ingress.
        run_dir: its run folder: logs, secrets, stack.json.
        start_s: process start to ready, seconds.
    """

    url: str
    run_dir: Path
    process: subprocess.Popen[bytes]
    start_s: float

    def stack(self) -> dict[str, Any]:
        """What `fleet up` wrote about itself: urls and pids."""
        stack: dict[str, Any] = json.loads((self.run_dir / "stack.json").read_text())
        return stack

    def status(self) -> dict[str, Any]:
        """`fleet status --json`."""
        command = [sys.executable, "-m", "fleet_cli", "status", "--json", "--run-dir", str(self.run_dir)]
        answer = subprocess.run(command, check=True, capture_output=True, timeout=30)
        status: dict[str, Any] = json.loads(answer.stdout)
        return status

    def command(self, *words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Any other `fleet` command on this stack."""
        command = [sys.executable, "-m", "fleet_cli", *words, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)

    def workers(self, stage: str) -> list[dict[str, Any]]:
        """Live workers of a stage, from `fleet status`."""
        return [worker for worker in self.status()["workers"] if worker["stage"] == stage]

    def log(self, name: str) -> str:
        """Everything one child printed."""
        return (self.run_dir / "logs" / f"{name}.log").read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 200.0) -> None:
        """Until /health/ready answers 200."""
        wait_for(lambda: httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200, timeout_s, "ready")

    def wait_workers(self, stage: str, count: int, timeout_s: float = 200.0) -> list[dict[str, Any]]:
        """Until `count` workers of a stage are ready; returns them."""

        def ready() -> list[dict[str, Any]]:
            return [worker for worker in self.workers(stage) if worker["state"] == "ready"]

        wait_for(lambda: len(ready()) >= count, timeout_s, f"{count} ready {stage} workers")
        return ready()


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until `condition()` is true; connection errors count as false. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            if condition():
                return
        except (httpx.TransportError, subprocess.SubprocessError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")


#: What tests that say nothing of them do without: nine processes, and models that they did not name.
_NO_OTHERS = {
    "FLEET_EMBEDDING_MODEL": "",
    "FLEET_TRANSCRIBE_MODEL": "",
    "FLEET_SPEECH_MODEL": "",
    "FLEET_IMAGE_MODEL": "",
    "FLEET_PIPELINES": "",
}


@contextmanager
def running_fleet(
    run_dir: Path, settings: Mapping[str, str], timeout_s: float = 400.0, options: Sequence[str] = ()
) -> Iterator[RunningFleet]:
    """Start `fleet up` on a free port with `settings` (FLEET_* variables) and `options`; Ctrl-C it at the end.

    Raises:
        RuntimeError: it ended before it was ready; the message holds what it printed.
    """
    port = free_port()
    environment = {**os.environ, **_NO_OTHERS, **settings, "FLEET_HTTP_PORT": str(port)}
    command = [sys.executable, "-m", "fleet_cli", "up", "--run-dir", str(run_dir), "--stop-with-stdin", *options]
    run_dir.mkdir(parents=True, exist_ok=True)
    output = run_dir / "up.log"
    started_s = time.monotonic()
    with output.open("wb") as stream:
        # The pipe ends with this process, however it ends: no test run leaves a fleet behind.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"fleet up exited with {process.returncode}:\n{output.read_text()[-4000:]}")
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200

    try:
        try:
            wait_for(is_ready, timeout_s, "the fleet is ready")
        except TimeoutError as error:
            raise RuntimeError(f"{error}\n{output.read_text()[-4000:]}") from error
        yield RunningFleet(url, run_dir, process, time.monotonic() - started_s)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> float:
    """Ctrl-C; returns the seconds it took to go. Kills it, and raises, when it does not."""
    started_s = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    return time.monotonic() - started_s
