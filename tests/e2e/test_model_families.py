"""Every family: the same media through our embeddings and through vLLM's own tower give the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_decode.engine.environment import decode_environment
from fleet_decode.engine.families import FAMILIES
from tests.support.tiny_models import WRITERS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILIES) == set(WRITERS)


@pytest.mark.parametrize("family", list(WRITERS))
def test_embeddings_give_the_tokens_of_vllms_own_tower(family: str, tmp_path: Path) -> None:
    """20 random pictures of 20 to 400 pixels a side (or clips of 0.1 to 12 s), videos, and three together."""
    folder = tmp_path / family
    folder.mkdir()
    environment = os.environ | decode_environment(str(folder), threads=1, kv_cache_gib=1)
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "tests.support.family_answers", family, str(folder)]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    answers = json.loads(ran.stdout.splitlines()[-1])
    embeddings, vllm = answers["embeddings"], answers["vllm"]

    assert embeddings == vllm
    assert len({tuple(ids) for ids, _ in vllm}) >= 8, "these media make no difference"
    assert vllm[-1] != vllm[-2], "the order of media makes no difference"
    assert "StageMissingLayer" in answers["modules"] or "vision" not in answers["modules"]
