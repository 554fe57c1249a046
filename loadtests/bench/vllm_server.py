"""vLLM's own OpenAI server, the thing to stand beside: started with the cores and threads our decode worker gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from fleet_common.testing.servers import free_port
from fleet_decode.engine.environment import decode_environment

_READY_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True)
class MonolithServer:
    """A running server. `start_s`: process start to /health 200."""

    url: str
    model: str
    start_s: float


@contextmanager
def monolith(model_path: Path, *, threads: int, max_num_seqs: int, log: Path) -> Iterator[MonolithServer]:
    """Run `vllm.entrypoints.openai.api_server` on loopback until the block ends."""
    port = free_port()
    environment = dict(os.environ)
    environment.update(decode_environment(str(model_path), threads=threads, kv_cache_gib=1))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model_path), "--served-model-name", "model", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-seqs", str(max_num_seqs), "--max-model-len", "2048"]
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_healthy(process, f"http://127.0.0.1:{port}/health", log)
        yield MonolithServer(f"http://127.0.0.1:{port}", "model", time.monotonic() - started_s)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM's server exited with {process.returncode}:\n{log.read_text()[-2000:]}")
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.25)
    raise RuntimeError(f"vLLM's server was not ready within {_READY_TIMEOUT_S:.0f} s:\n{log.read_text()[-2000:]}")
