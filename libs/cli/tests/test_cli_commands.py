"""The parts of the commands that need no fleet."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
from pathlib import Path

import pydantic
import pytest
from rich.table import Table

from fleet_cli import app, bus_commands, tap
from fleet_cli.__main__ import settings_fault
from fleet_cli.errors import CliError
from fleet_cli.status import pools, read
from fleet_cli.up.child import Child
from fleet_cli.up.ports import check_free, free_ports
from fleet_cli.up.rundir import RunDir
from fleet_cli.up.settings import UpSettings
from fleet_cli.up.spec import ProcessSpec, StopRank
from fleet_common.bus.port import ConsumerBacklog
from fleet_contracts import codec
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.examples import EXAMPLES
from fleet_contracts.work import StepTask

TASK = next(example for example in EXAMPLES if isinstance(example, StepTask))


def test_tap_decodes_every_message_of_the_fleet_without_our_structs() -> None:
    for message in EXAMPLES:
        decoded = tap.decode(codec.encode(message))

        assert decoded["type"] == type(message).__struct_config__.tag
        assert json.loads(tap.json_line("fleet.work.decode.p.realtime.any", decoded, 1.0))["subject"]
        assert "\n" not in tap.text_line("fleet.work.decode.p.realtime.any", decoded, 1.0)


def test_tap_shows_bytes_that_are_no_message_as_such() -> None:
    assert "undecodable" in tap.text_line("fleet.work.decode.p.realtime.any", tap.decode(b"\xc1"), 1.0)


def test_tap_filters_by_stage_and_request() -> None:
    subject = "fleet.work.decode.decode-cpu.realtime.any"
    message = tap.decode(codec.encode(TASK))

    assert tap.Filter(stage="decode").admits(subject, message)
    assert not tap.Filter(stage="preprocess").admits(subject, message)
    assert tap.Filter(request=TASK.request_id).admits(subject, message)
    assert not tap.Filter(request="another").admits(subject, message)
    assert not tap.Filter().admits("fleet.telemetry.decode.decode-0", {})


def test_pools_add_their_lanes_up() -> None:
    def backlog(lane: str, pending: int) -> ConsumerBacklog:
        return ConsumerBacklog(Stage.DECODE, "p", PriorityClass.BATCH, lane, pending, 1)

    (pool,) = pools([backlog("any", 2), backlog("w-x", 3)])

    assert (pool["pending"], pool["num_pending"], pool["num_unsettled"]) == ({"batch": 5}, 5, 2)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_declared_fleet_is_read_from_yaml_and_json(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"fleet{suffix}"
    path.write_text('{"pools": [{"stage": "decode", "pool": "p", "model": "m", "workers": ["w-0"]}]}')

    spec = bus_commands.read_spec(path)

    assert (spec.pools[0].stage, spec.pools[0].workers) == (Stage.DECODE, ("w-0",))


def test_a_wrong_declaration_says_where(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("pools: [{stage: nowhere, pool: p, model: m}]")

    with pytest.raises(CliError, match="stage"):
        bus_commands.read_spec(path)


def test_the_deployed_fleet_is_a_valid_declaration() -> None:
    path = Path(__file__).parents[3] / "deploy" / "fleet.yaml"

    assert bus_commands.read_spec(path).pools


def test_secrets_fill_the_variables_of_the_brokers_configuration() -> None:
    names = {line.partition("=")[0] for line in bus_commands.secret_lines()}

    text = bus_commands.config_with_variables(4222, Path("/data"))

    for name in names - {"FLEET_STORE_PASSWORD"}:
        assert f"password: ${name}," in text


def test_a_run_folder_is_private_and_for_one_stack(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")

    with folder.locked():
        folder.make_secrets()
        with pytest.raises(CliError, match="already"), RunDir(tmp_path / "run").locked():
            raise AssertionError

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run" / "secrets.json").stat().st_mode) == 0o600
    assert RunDir(tmp_path / "other").namespace != folder.namespace


def test_a_run_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CliError, match="FLEET_RUN_DIR"), RunDir(tmp_path / "file" / "run").locked():
        raise AssertionError


def test_wrong_settings_are_named_without_their_values() -> None:
    with pytest.raises(pydantic.ValidationError) as wrong:
        UpSettings(http_port=99_999, engine="of-a-stranger")  # type: ignore[call-arg]

    told = settings_fault(wrong.value)

    assert told.startswith("FLEET_HTTP_PORT: Input should be less than or equal to 65535; FLEET_ENGINE: ")
    assert "stranger" not in told


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (
            'Traceback:\n  File "x"\na.b.ValidationError: 1 error for S\nslots\n  Input is bad\n    See https://x\n',
            "Input is bad",
        ),
        ('{"reasons": ["EngineDeadError: no model"]}\n', "no model"),
        ("", ""),
    ],
)
def test_a_child_that_ended_is_quoted_with_its_reason(tmp_path: Path, printed: str, told: str) -> None:
    (tmp_path / "child.log").write_text(printed)
    spec = ProcessSpec(name="child", command=(), environment={}, port=0, rank=StopRank.WORKER)

    assert told in Child(spec, tmp_path / "child.log", lambda child, text: None).last_words()


def test_without_a_stack_a_command_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="fleet up"):
        RunDir(tmp_path).read_stack()


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        with pytest.raises(CliError, match="FLEET_HTTP_PORT"):
            check_free("127.0.0.1", taken.getsockname()[1])


def test_free_ports_are_all_different() -> None:
    ports = free_ports(f"p{index}" for index in range(20))

    assert len(set(ports.values())) == 20


def test_status_passes_over_entries_it_cannot_read() -> None:
    assert read(codec.decode_registry_entry, b"\x80\x04 of a stranger") is None
    assert read(codec.decode_task, codec.encode(TASK)) == TASK


def test_status_that_is_piped_cuts_no_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def nothing_read(spec: object) -> None:
        return None

    name = "preprocess-all-minilm-l6-v2-d2ab48"
    monkeypatch.setattr(app, "find_fleet", lambda run_dir: None)
    monkeypatch.setattr(app, "read_status", nothing_read)
    monkeypatch.setattr(app, "show", lambda found, console: console.print(Table("worker", name, *[name] * 3)))
    monkeypatch.setenv("COLUMNS", "80")

    app.status(None)

    assert capsys.readouterr().out.count(name) == 4
