"""Three pictures of one request over three vision workers, beside one worker; an encoder of fixed cost."""

from __future__ import annotations

import base64
import io
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from PIL import Image

from fleet_cli.testing import running_fleet
from loadtests.bench.figure import Figure

MODEL = "omnifleet-vlm"
NUM_PICTURES = 3
NUM_ROUNDS = 7
#: Seconds the scripted encoder sleeps per picture: far above a hop, so that two cores can show three workers.
COST_S = 0.2


def _picture() -> str:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 80).convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _median_s(url: str, execution: str) -> float:
    """Median seconds of a chat with fresh pictures: no feature cache helps."""
    took_s = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(NUM_ROUNDS + 1):
            parts = [{"type": "image_url", "image_url": {"url": _picture()}} for _ in range(NUM_PICTURES)]
            message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
            body = {"model": MODEL, "messages": [message], "max_tokens": 2, "execution": execution}
            started_s = time.perf_counter()
            client.post("/v1/chat/completions", json=body).raise_for_status()
            took_s.append(time.perf_counter() - started_s)
    return statistics.median(took_s[1:])


def _measure(num_workers: int, *executions: str) -> list[float]:
    settings = {
        "FLEET_ENGINE": "scripted",
        "FLEET_VISION_REPLICAS": str(num_workers),
        "FLEET_VISION_ENGINE_ARGS": f'{{"cost_s": {COST_S}}}',
    }
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder) / "fleet", settings) as fleet:
        return [_median_s(fleet.url, execution) for execution in executions]


def figures() -> list[Figure]:
    """`fanout_speedup`: one worker's time through three workers' (a request of three pictures)."""
    (alone_s,) = _measure(1, "parallel")
    parallel_s, serial_s = _measure(NUM_PICTURES, "parallel", "serial")
    return [
        Figure("fanout_parallel_p50", parallel_s * 1e3, "ms", alone_s * 1e3, note="three vision workers, beside one"),
        Figure("fanout_serial_p50", serial_s * 1e3, "ms", alone_s * 1e3, note="the same three, execution: serial"),
        Figure("fanout_speedup", alone_s / parallel_s, "x", 2.0, note="wanted: >= 2"),
    ]
