"""A fleet for the failure cases of shared/cases: what a client sends is real, what it gets is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fleet_cli.testing import RunningFleet, running_fleet
from fleet_cli.up.settings import UpSettings
from fleet_models import prepare
from tests.support.cases import FAULT_WORD, CaseClient

MODEL = "omnifleet-vlm"


@pytest.fixture(scope="module")
def case_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Real preprocess (template, tokenizer, media); every answer is `abSTOPcd`, an emoji cut in two, and ` ok`."""
    decode = {
        "pieces_hex": [b.hex() for b in (b"ab", b"STO", b"P", b"cd", b"\xf0\x9f", b"\x98\x80", b" ok")],
        "token_delay_s": 0.05,
        "hidden_size": 576,
        "image_tokens": 16,
        "raise_after_tokens": 3,
        "fault_prompt_token": fault_token_id(),
    }
    settings = {
        "FLEET_VISION_ENGINE": "scripted",
        "FLEET_DECODE_ENGINE": "scripted",
        "FLEET_DECODE_ENGINE_ARGS": json.dumps(decode),
    }
    with running_fleet(tmp_path_factory.mktemp("case_fleet"), settings, timeout_s=120.0) as fleet:
        yield fleet


@pytest.fixture
def cases(case_fleet: RunningFleet, case_files: Path) -> CaseClient:
    """Sends bodies and files of the cases."""
    return CaseClient(case_fleet, case_files)


def fault_token_id() -> int:
    """A token that only prompts with `FAULT_WORD` hold."""
    folder = prepare(MODEL, UpSettings().model_cache.expanduser(), print)
    (token_id,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(FAULT_WORD).ids
    return int(token_id)
