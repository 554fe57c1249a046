"""What an operator sees of a request: one linked trace, one log line per step, metrics, a load report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleet_cli.testing import RunningFleet, running_fleet, wait_for
from tests.support.otlp import SpanSink, otlp_receiver
from tests.support.scenes import data_url, picture_message, random_scene, render

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sink() -> Iterator[SpanSink]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def fleet(sink: SpanSink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    settings = {
        "FLEET_ENGINE": "scripted",
        "FLEET_TELEMETRY__OTLP_ENDPOINT": sink.url,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with running_fleet(tmp_path_factory.mktemp("observed"), settings) as running:
        yield running


@pytest.fixture(scope="module")
def request_id(fleet: RunningFleet) -> str:
    """Id of one finished chat with a picture."""
    import random

    message = picture_message(data_url(render(random_scene(random.Random(1)))))
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions", json={"model": MODEL, "messages": [message], "max_tokens": 4}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"]).removeprefix("chatcmpl-")


def test_one_trace_runs_through_every_service(fleet: RunningFleet, sink: SpanSink, request_id: str) -> None:
    wanted = {
        ("fleet-ingress", f"chat {MODEL}"),
        ("fleet-preprocess", "process preprocess"),
        ("fleet-vision_encode", "process vision_encode"),
        ("fleet-decode", "process decode"),
    }

    def traces() -> dict[bytes, set[tuple[str, str]]]:
        found: dict[bytes, set[tuple[str, str]]] = {}
        for service, span in sink.spans:
            found.setdefault(span.trace_id, set()).add((service, span.name))
        return found

    wait_for(lambda: any(wanted <= names for names in traces().values()), 20, f"one trace with {wanted}")

    assert not any(request_id in span.name for _, span in sink.spans)


def test_a_finished_step_is_one_json_line(fleet: RunningFleet, request_id: str) -> None:
    for name in ("preprocess-0", "vision-0", "decode-0"):
        lines = [json.loads(line) for line in fleet.log(name).splitlines() if line.startswith("{")]

        finished = [line for line in lines if line["event"] == "step_finished" and line["request_id"] == request_id]

        assert len(finished) == 1
        assert finished[0]["outcome"] == "ok" and finished[0]["queue_wait_s"] >= 0 and finished[0]["worker_id"] == name


def test_metrics_count_the_request_at_every_process(fleet: RunningFleet, request_id: str) -> None:
    edge = httpx.get(f"{fleet.url}/metrics", timeout=5).text
    port = fleet.stack()["processes"]["decode-0"]["port"]
    worker = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text

    assert re.search(r"gen_ai_server_time_to_first_token_seconds_count\{[^}]*\} [1-9]", edge)
    assert re.search(r"gen_ai_server_request_duration_seconds_count\{[^}]*\} [1-9]", edge)
    assert re.search(r'fleet_stage_steps_total\{[^}]*outcome="ok"[^}]*\} [1-9]', worker)
    assert "fleet_bus_drops_total 0.0" in edge and "fleet_bus_reconnects_total 0.0" in worker
    assert request_id not in edge + worker


def test_locust_reports_ttft_as_its_own_row(fleet: RunningFleet, request_id: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), "--headless"]
    command += ["-u", "4", "-r", "4", "-t", "5s", "-H", fleet.url, "--html", str(tmp_path / "load.html")]
    command += ["--only-summary", "--exit-code-on-error", "1"]

    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})

    assert run.returncode == 0, run.stdout + run.stderr
    assert "TTFT" in (tmp_path / "load.html").read_text()


def test_compose_accepts_the_stack() -> None:
    names = re.findall(r"\$\{(\w+):\?", (ROOT / "deploy" / "compose.yaml").read_text())
    environment = {**os.environ, **dict.fromkeys(names, "secret")}
    compose = Path(sys.executable).parent / "docker-compose"

    run = subprocess.run(
        [str(compose), "-f", str(ROOT / "deploy" / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )

    assert run.returncode == 0, run.stderr
