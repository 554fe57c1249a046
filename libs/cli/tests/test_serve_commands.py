"""What `fleet serve` and `fleet unserve` write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet_cli.errors import CliError
from fleet_cli.serve import (
    ServeOptions,
    check_names,
    parse_adapters,
    parse_replicas,
    parse_stage_args,
    unwanted_model,
    wanted_model,
    with_adapters,
)
from fleet_cli.status import models
from fleet_cli.up import adapters, model
from fleet_cli.up.child import Child
from fleet_cli.up.settings import UpSettings
from fleet_cli.up.spec import ProcessSpec, StopRank, chat_model
from fleet_contracts.base import Stage
from fleet_contracts.control import ModelCard, RoutingTable
from fleet_contracts.models import AdapterSpec, ModelSpec, ModelState, ModelStatus

KNOWN = ModelSpec(model="org/m", source="org/m", generation=7, takes_adapters=True)
PLAIN = ModelSpec(model="plain", source="org/m", generation=7)
READY = ModelStatus(model="org/m", generation=7, state=ModelState.READY, since_unix_s=0.0)
PIRATE = AdapterSpec(name="pirate", path="/pirate")


def test_options_are_read_by_stage() -> None:
    assert parse_replicas(["decode=2", "vision=3"]) == {Stage.DECODE: 2, Stage.VISION_ENCODE: 3}
    assert parse_stage_args(['decode={"a":1}', 'decode={"b":[2]}']) == {Stage.DECODE: {"a": 1, "b": [2]}}


@pytest.mark.parametrize("text", ["decode", "decode=", "=2", "decode=0", "decode=two", "kitchen=2"])
def test_replicas_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(CliError, match="--replicas"):
        parse_replicas([text])


@pytest.mark.parametrize("text", ["decode=max_model_len", "decode=[1]", "decode=1", "kitchen={}"])
def test_stage_arguments_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(CliError, match="--stage-args"):
        parse_stage_args([text])


@pytest.mark.parametrize("text", ["pirate", "../x=/a", "a b=/a", ".hidden=/a", "a/b=/a"])
def test_an_adapters_name_is_one_entry_of_a_folder(text: str) -> None:
    with pytest.raises(CliError, match="--adapter"):
        parse_adapters([text])


def test_a_folder_is_named_so_that_others_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)

    wanted = wanted_model("mine", ServeOptions(), None, None, 1.0)

    assert (wanted.model, wanted.source) == ("mine", str(tmp_path / "mine"))


def test_a_command_is_newer_than_the_one_before_whatever_the_clock_says() -> None:
    assert wanted_model("org/m", ServeOptions(), KNOWN, READY, 0.0).generation == 8
    assert wanted_model("org/m", ServeOptions(), None, None, 5.0).generation == 5000


def test_a_model_that_is_served_in_another_way_is_not_changed_under_its_clients() -> None:
    with pytest.raises(CliError, match="unserve"):
        wanted_model("org/m", ServeOptions(replicas={Stage.DECODE: 2}), KNOWN, READY, 0.0)


def test_a_model_that_failed_may_be_tried_again_in_another_way() -> None:
    failed = ModelStatus(model="org/m", generation=7, state=ModelState.FAILED, since_unix_s=0.0)

    wanted = wanted_model("org/m", ServeOptions(replicas={Stage.DECODE: 2}), KNOWN, failed, 0.0)

    assert wanted.replicas == {Stage.DECODE: 2}


def test_adapters_add_up_and_one_of_the_same_name_is_replaced() -> None:
    first = with_adapters(KNOWN, [PIRATE, AdapterSpec(name="poet", path="/poet")], 0.0)

    second = with_adapters(first, [AdapterSpec(name="pirate", path="/other")], 0.0)

    assert {adapter.name: adapter.path for adapter in second.adapters} == {"pirate": "/other", "poet": "/poet"}


def test_a_model_without_room_for_adapters_is_not_reloaded_for_one() -> None:
    with pytest.raises(CliError, match="--lora"):
        with_adapters(PLAIN, [PIRATE], 0.0)


def test_a_name_means_one_thing() -> None:
    adapted = with_adapters(KNOWN, [PIRATE], 0.0)
    other = ModelSpec(model="other", source="o", generation=1, takes_adapters=True)

    check_names(adapted, [KNOWN, other])
    for wanted in (
        ModelSpec(model="pirate", source="p", generation=1),
        with_adapters(other, [PIRATE], 0.0),
        with_adapters(other, [AdapterSpec(name="org/m", path="/x")], 0.0),
    ):
        with pytest.raises(CliError, match="name already"):
            check_names(wanted, [adapted, other])


def test_a_model_or_an_adapter_is_taken_off_by_its_name() -> None:
    adapted = with_adapters(KNOWN, [PIRATE], 0.0)

    model_off = unwanted_model("org/m", [adapted], 0.0)
    adapter_off = unwanted_model("pirate", [adapted], 0.0)

    assert not model_off.is_wanted
    assert (adapter_off.is_wanted, adapter_off.adapters, adapter_off.takes_adapters) == (True, (), True)
    with pytest.raises(CliError, match="org/m"):
        unwanted_model("nobody", [adapted], 0.0)


def test_status_shows_models_that_load_failed_or_were_never_asked_for() -> None:
    table = RoutingTable(revision=1, made_unix_s=0.0, policy="p", models=(ModelCard(model="by-hand"),))
    failed = ModelStatus(model="bad", generation=1, state=ModelState.FAILED, since_unix_s=0.0, error="no such folder")

    found = models(table, [ModelSpec(model="bad", source="b", generation=1), KNOWN], {"bad": failed})

    assert [(entry["model"], entry["state"]) for entry in found] == [
        ("bad", "failed"),
        ("by-hand", "ready"),
        ("org/m", "loading"),
    ]
    assert found[0]["error"] == "no such folder"


def test_a_model_wanted_with_adapters_gets_an_engine_with_room_for_them() -> None:
    found = chat_model(UpSettings(), "m", "", takes_pictures=False)

    plain = model.adapted(found, PLAIN)
    adapted = model.adapted(
        found,
        ModelSpec(
            model="m",
            source="m",
            generation=1,
            takes_adapters=True,
            engine_args={Stage.DECODE: {"max_lora_rank": 64}},
            replicas={Stage.DECODE: 3},
        ),
    )

    assert (plain.name, plain.max_adapter_rank, dict(plain.engine_args)) == ("plain", 0, {})
    assert (adapted.max_adapter_rank, adapted.engine_args[Stage.DECODE]["enable_lora"]) == (64, True)
    assert len(adapted.workers(Stage.DECODE)) == 3
    with pytest.raises(CliError, match="no stage vision_encode"):
        model.adapted(found, ModelSpec(model="m", source="m", generation=1, replicas={Stage.VISION_ENCODE: 1}))


def make_adapter(folder: Path, rank: int) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_workers_find_usable_adapters_by_name_and_no_others(tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", 8)
    big = make_adapter(tmp_path / "big", 64)
    links = tmp_path / "links"
    adapters.make_folder(links)
    adapters.set_links(links, [AdapterSpec(name="old", path=str(good))], 16)

    errors = adapters.set_links(
        links,
        [
            AdapterSpec(name="good", path=str(good)),
            AdapterSpec(name="big", path=str(big)),
            AdapterSpec(name="missing", path=str(tmp_path / "nowhere")),
        ],
        16,
    )

    assert [link.name for link in links.iterdir()] == ["good"]
    assert (links / "good").resolve() == good
    assert "rank 64" in errors["big"]
    assert "adapter_config.json" in errors["missing"]
    assert adapters.problem(good, 0) != ""


def test_a_workers_last_words_are_why_it_failed(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    line = {"event": "worker_failed", "reasons": ["EngineDeadError: vLLM could not load 'm':\n no such type"]}
    log.write_text("Traceback: noise\n" + json.dumps(line) + "\n")
    child = Child(ProcessSpec("decode-0", (), {}, 0, StopRank.WORKER), log, lambda child, text: None)

    assert child.last_words() == "vLLM could not load 'm': no such type"
