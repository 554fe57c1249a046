"""What one request with a picture puts on the broker, and what a hop between two workers costs; scripted engines."""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
from pathlib import Path

import httpx
from PIL import Image

from fleet_cli.connect import find_fleet
from fleet_cli.testing import RunningFleet, running_fleet
from fleet_common.bus.nats import connect_bus
from fleet_common.bus.port import BusMessage
from loadtests.bench.client import median
from loadtests.bench.figure import Figure

MODEL = "omnifleet-vlm"
NUM_REQUESTS = 20
LIMIT_BYTES = 8192


def _picture() -> str:
    buffer = io.BytesIO()
    Image.effect_noise((640, 480), 80).convert("RGB").save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


async def _measure(fleet: RunningFleet) -> list[Figure]:
    bus = await connect_bus(find_fleet(fleet.run_dir).bus, "bench")
    payloads: list[int] = []

    async def count(message: BusMessage) -> None:
        payloads.append(len(message.payload))

    subscription = await bus.subscribe("fleet.work.>", count)
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": _picture()}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    sizes: list[int] = []
    hops_s: list[float] = []
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as client:
        for _ in range(NUM_REQUESTS):
            payloads.clear()
            response = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            sizes.append(sum(payloads))
            timeline = (await client.get(f"/v1/requests/{response.json()['id']}")).raise_for_status().json()
            hops_s += [
                step["started_unix_s"] - step["queued_unix_s"] for step in timeline["steps"] if step["queued_unix_s"]
            ]
    await subscription.stop()
    await bus.close()
    return [
        Figure("nats_bytes_per_image_request", max(sizes), "bytes", LIMIT_BYTES, max(sizes) / LIMIT_BYTES, "the limit"),
        Figure("queue_wait_p50", median(hops_s) * 1e3, "ms", note="publish to start of a step, idle fleet"),
    ]


def figures() -> list[Figure]:
    """`nats_bytes_per_image_request`, `queue_wait_p50`."""
    settings = {"FLEET_ENGINE": "scripted"}
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder) / "fleet", settings) as fleet:
        return asyncio.run(_measure(fleet))
