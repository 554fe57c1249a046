"""Fleets that tests share: one with real models for the whole run (loading them takes minutes of CPU)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from fleet_cli.testing import RunningFleet, running_fleet

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def real_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Real models, two workers each for vision and decode: whatever dies has a neighbour."""
    settings = {"FLEET_DECODE_REPLICAS": "2", "FLEET_VISION_REPLICAS": "2"}
    with running_fleet(tmp_path_factory.mktemp("real_fleet"), settings) as fleet:
        fleet.wait_workers("decode", 2)
        fleet.wait_workers("vision_encode", 2)
        yield fleet


@pytest.fixture
def client(real_fleet: RunningFleet) -> openai.OpenAI:
    """The official client, unmodified."""
    return openai.OpenAI(base_url=f"{real_fleet.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def case_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The media files of shared/cases, made afresh."""
    script = SHARED / "cases" / "make_cases.py"
    assert script.exists(), f"{script.name} is missing: the cases lie beside the checkout"
    folder = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder
