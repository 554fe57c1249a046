"""`fleet pipelines`: what it says of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet_cli.app import app
from fleet_cli.pipelines import pipelines_folder

SHIPPED = Path(__file__).parents[3] / "pipelines"


def test_right_files_pass(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["pipelines", "check", str(SHIPPED)])

    assert found.exit_code == 0
    assert "voice-assistant is right; it needs whisper-tiny.en, omnifleet-vlm, hibari" in found.stdout


def test_a_wrong_file_is_named_with_its_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((SHIPPED / "illustrate.yaml").read_text().replace("stage: draw", "stage: paint"))

    found = CliRunner().invoke(app, ["pipelines", "check", str(SHIPPED / "illustrate.yaml"), str(wrong)])

    assert found.exit_code == 1
    assert f"{wrong}:15: `stage` is one of: transcribe, chat, draw, speak" in found.stdout


def test_two_files_of_one_id_are_a_fault(tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text((SHIPPED / "illustrate.yaml").read_text())

    found = CliRunner().invoke(app, ["pipelines", "check", str(SHIPPED), str(tmp_path)])

    assert found.exit_code == 1
    assert f"{copy}:2: `illustrate` is the pipeline of {SHIPPED / 'illustrate.yaml'}" in found.stdout


def test_the_folder_is_that_of_the_settings_or_what_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_PIPELINES", str(tmp_path))
    nothing = CliRunner().invoke(app, ["pipelines", "list"])
    monkeypatch.delenv("FLEET_PIPELINES")
    all_three = CliRunner().invoke(app, ["pipelines", "list"])

    assert nothing.stdout == ""
    assert [line.split("\t")[0] for line in all_three.stdout.splitlines()] == [
        "describe-aloud",
        "illustrate",
        "voice-assistant",
    ]
    assert (pipelines_folder(None), pipelines_folder("")) == (SHIPPED, None)
