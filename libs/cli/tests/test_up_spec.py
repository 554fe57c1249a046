"""What a local fleet consists of."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fleet_cli.errors import CliError
from fleet_cli.up import example, model, spec, stores
from fleet_cli.up.leftovers import MARK
from fleet_cli.up.progress import Waiting, describe
from fleet_cli.up.settings import UpSettings, environment, inherited, passed_on
from fleet_cli.up.spec import Place, ProcessSpec, Secrets, ServedModel, StopRank, chat_model, group_name
from fleet_contracts.base import Stage

SECRETS = Secrets(
    bus={user: f"{user}-secret" for role in spec.ROLES for user in (role, f"{role}_control")}, store="store-secret"
)


STORES = {
    "redis": ["valkey-server"],
    "mooncake": ["mooncake-master", "mooncake-node"],
    "yuanrong": ["yuanrong-worker"],
}


def model_of(up: UpSettings) -> ServedModel:
    return chat_model(up, "omnifleet-vlm", "/models/omnifleet-vlm", takes_pictures=True)


def second_model(up: UpSettings) -> ServedModel:
    name = "org/Some.Model-7B"
    return chat_model(up, name, name, takes_pictures=False, group=group_name(name))


def place_of(up: UpSettings) -> Place:
    workers = [name for model in (model_of(up), second_model(up)) for name in model.all_workers()]
    names = (*spec.server_ports(up), *spec.CONTROL, *workers)
    ports = {name: 9000 + number for number, name in enumerate(names)}
    return Place(Path("/run/fleet"), "python", "omnifleet-0123", ports, up.connector)


def servers(connector: str) -> list[ProcessSpec]:
    place = place_of(UpSettings(connector=connector))
    binaries = {name: Path("/bin") / name for name in STORES[connector]}
    store = stores.store_servers(connector, stores.StorePlace(place.ports, binaries, place.run_dir, Path("/tmp/s")))
    return list(spec.server_specs(place, Path("/bin/nats-server"), store, {"PATH": "/bin"}))


def services(variables: dict[str, str] | None = None, **settings: object) -> dict[str, ProcessSpec]:
    up = UpSettings(**settings)
    place = place_of(up)
    placement, ingress = spec.control_specs(up, place, SECRETS, variables or {})
    found = (placement, *spec.worker_specs(up, model_of(up), place, SECRETS, variables or {}), ingress)
    return {service.name: service for service in found}


def test_the_default_fleet_has_one_of_each() -> None:
    assert list(services()) == ["placement", "preprocess-0", "vision-0", "decode-0", "ingress"]


def test_replicas_become_workers_and_declared_lanes() -> None:
    up = UpSettings(decode_replicas=2, vision_replicas=2)

    declared = spec.fleet_spec([model_of(up)])

    assert set(services(decode_replicas=2)) >= {"decode-0", "decode-1"}
    decode = next(pool for pool in declared.pools if pool.stage == Stage.DECODE)
    assert (decode.pool, decode.workers) == ("decode-cpu", ("decode-0", "decode-1"))


def test_a_text_model_has_no_vision_workers() -> None:
    declared = spec.fleet_spec([chat_model(UpSettings(), "text", "/models/text", takes_pictures=False)])

    assert [pool.stage for pool in declared.pools] == [Stage.PREPROCESS, Stage.DECODE]


def test_every_model_has_pools_and_workers_of_its_own() -> None:
    up = UpSettings()
    first, second = model_of(up), second_model(up)

    pools = spec.fleet_spec([first, second]).pools
    names = [worker for pool in pools for worker in pool.workers]

    assert [pool.model for pool in pools] == [first.name] * 3 + [second.name] * 2
    assert len({(pool.stage, pool.pool) for pool in pools}) == len(pools)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_-]{1,40}", pool.pool) for pool in pools)


def test_models_whose_names_look_alike_have_different_groups() -> None:
    assert group_name("org/model-7b") != group_name("org-model-7b")
    assert group_name("a-very-long-name-1") != group_name("a-very-long-name-2")
    assert all(
        len(chat_model(UpSettings(), "m", "", takes_pictures=True, group=group_name("M" * 90)).pool(stage)) <= 40
        for stage in Stage
    )


def test_a_models_engine_arguments_win_over_those_for_all_and_reach_no_other_stage() -> None:
    up = UpSettings()
    own = dataclasses.replace(model_of(up), engine_args={Stage.DECODE: {"max_model_len": 2048}})
    variables = {"FLEET_DECODE_ENGINE_ARGS": '{"max_model_len": 64, "seed": 1}'}

    found = {w.name: w.environment for w in spec.worker_specs(up, own, place_of(up), SECRETS, variables)}

    assert json.loads(found["decode-0"]["FLEET_DECODE_ENGINE_ARGS"]) == {"max_model_len": 2048, "seed": 1}
    assert "FLEET_VISION_ENGINE_ARGS" not in found["vision-0"]


def test_each_role_gets_its_own_passwords_and_no_others() -> None:
    for name, service in services().items():
        role = {"placement": "placement", "ingress": "ingress"}.get(name, "worker")
        assert service.environment["FLEET_BUS__USER"] == role
        assert service.environment["FLEET_BUS__WORK_PASSWORD"] == f"{role}-secret"
        assert service.environment["FLEET_BUS__CONTROL_PASSWORD"] == f"{role}_control-secret"
        assert "admin-secret" not in " ".join(service.environment.values())
        assert "secret" not in " ".join(service.command)
        assert "secret" not in repr(service)


def test_every_process_is_told_of_its_stack_and_nothing_else_of_the_surroundings() -> None:
    variables = {"PATH": "/bin", "HF_TOKEN": "t", "SSH_AUTH_SOCK": "/s", "FLEET_DECODE_REPLICAS": "1"}

    for service in services(variables).values():
        assert service.environment[MARK] == "omnifleet-0123"
        assert service.environment["PATH"] == "/bin"
        assert "SSH_AUTH_SOCK" not in service.environment
        assert "FLEET_DECODE_REPLICAS" not in service.environment


def test_a_services_own_settings_pass_through_to_it_alone() -> None:
    found = services({"FLEET_DECODE_SLOTS": "16", "FLEET_RUNNER__ACK_WAIT_S": "3"})

    assert found["decode-0"].environment["FLEET_DECODE_SLOTS"] == "16"
    assert "FLEET_DECODE_SLOTS" not in found["vision-0"].environment
    assert all(service.environment["FLEET_RUNNER__ACK_WAIT_S"] == "3" for service in found.values())


def test_what_the_supervisor_decides_cannot_be_overridden_by_accident() -> None:
    found = services({"FLEET_DECODE_WORKER_ID": "mine", "FLEET_INGRESS_HTTP_PORT": "1"}, http_port=8123)

    assert found["decode-0"].environment["FLEET_DECODE_WORKER_ID"] == "decode-0"
    assert found["ingress"].environment["FLEET_INGRESS_HTTP_PORT"] == "8123"


def test_scripted_engines_get_no_model_environment() -> None:
    found = services(engine="scripted")

    assert found["decode-0"].environment["FLEET_DECODE_ENGINE"] == "scripted"
    assert "VLLM_CPU_KVCACHE_SPACE" not in found["decode-0"].environment
    assert "VLLM_CPU_KVCACHE_SPACE" in services()["decode-0"].environment


def test_the_ingress_is_stopped_before_the_workers_and_the_servers_last() -> None:
    found = services()

    assert found["ingress"].rank < found["decode-0"].rank < found["placement"].rank < StopRank.SERVER


def test_the_store_listens_on_loopback_with_its_password() -> None:
    place = Place(Path("/run/fleet"), "python", "n", {"valkey-server": 9001})

    lines = spec.valkey_config(place, "store-secret").splitlines()

    assert {"bind 127.0.0.1", "port 9001", "requirepass store-secret"} <= set(lines)


@pytest.mark.parametrize("connector", list(STORES))
def test_a_connector_brings_its_own_servers_and_no_others(connector: str) -> None:
    found = servers(connector)

    assert [server.name for server in found] == ["nats-server", *STORES[connector]]
    assert {server.rank for server in found} == {StopRank.SERVER}
    assert all(server.environment[MARK] == "omnifleet-0123" for server in found)
    assert len({server.port for server in found}) == len(found)


@pytest.mark.parametrize(
    ("connector", "variable"),
    [
        ("redis", "FLEET_STORE__REDIS_URL"),
        ("mooncake", "FLEET_STORE__MOONCAKE__MASTER_ADDRESS"),
        ("yuanrong", "FLEET_STORE__YUANRONG__WORKER_ADDRESS"),
    ],
)
def test_services_are_told_of_one_store_alone(connector: str, variable: str) -> None:
    port = place_of(UpSettings(connector=connector)).store_port
    addresses = ("REDIS_URL", "MASTER_ADDRESS", "WORKER_ADDRESS")

    for service in services(connector=connector).values():
        assert [name for name in service.environment if name.endswith(addresses)] == [variable]
        assert f"127.0.0.1:{port}" in service.environment[variable]
        assert service.environment["FLEET_STORE__NETWORK"] == connector


def test_the_storage_node_is_started_after_its_master_which_keeps_what_is_pinned() -> None:
    _, master, node = servers("mooncake")

    assert node.needs == ("mooncake-master",)
    assert f"--master_server_address=127.0.0.1:{master.port}" in node.command
    assert {f"--rpc_port={master.port}", "--allow_evict_soft_pinned_objects=false"} <= set(master.command)
    assert "--metrics_host=127.0.0.1" in master.command


def test_a_yuanrong_worker_is_ready_when_it_says_so_and_finds_its_libraries() -> None:
    _, worker = servers("yuanrong")

    assert worker.ready_path == Path("/tmp/s/ready")
    assert "--ready_check_path=/tmp/s/ready" in worker.command
    assert worker.environment["LD_LIBRARY_PATH"] == "/bin/lib"


def test_a_model_may_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))

    found = model.named_model(UpSettings(), str(tmp_path), None)

    assert found == chat_model(UpSettings(), tmp_path.name, str(tmp_path), takes_pictures=True)


def test_a_model_that_hears_has_an_encoder_and_is_shown_no_picture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"audio_config": {}}))

    found = model.named_model(UpSettings(), str(tmp_path), None)

    assert found.replicas[Stage.VISION_ENCODE] == 1
    assert not found.takes_pictures


def test_a_folder_without_a_vision_tower_takes_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert not model.named_model(UpSettings(), str(tmp_path), None).takes_pictures


def test_a_model_that_draws_is_a_diffusers_folder_or_what_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    up = UpSettings(image_model="org/painter", diffusion_replicas=2)

    for found in (
        model.named_model(up, str(tmp_path), None),
        model.named_model(up, "org/painter", None),
        model.scripted_model(up, "org/painter"),
    ):
        assert found.replicas == {Stage.PREPROCESS: 1, Stage.DIFFUSION_GENERATE: 2}
        assert found.workers(Stage.DIFFUSION_GENERATE) == ("diffusion-0", "diffusion-1")
        assert found.pool(Stage.DIFFUSION_GENERATE) == "diffusion-cpu"
    assert model.drawing_sources(up) == ("org/painter",)
    assert model.drawing_sources(UpSettings(image_model="")) == ()


def test_a_model_may_be_a_hugging_face_id() -> None:
    found = model.named_model(UpSettings(), "org/some-model-7b", None)

    assert found == chat_model(UpSettings(), "org/some-model-7b", "org/some-model-7b", takes_pictures=True)


@pytest.mark.parametrize("name", ["nonsense", "/nowhere/at/all"])
def test_anything_else_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(CliError, match="omnifleet-vlm"):
        model.named_model(UpSettings(), name, None)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"config\.json"):
        model.named_model(UpSettings(), str(tmp_path), None)


def test_a_model_that_hears_has_a_preprocess_of_its_own_kind() -> None:
    up = UpSettings(transcribe_replicas=2)
    hearing = spec.hearing_model(up, "whisper-tiny.en", "/models/whisper", group_name("whisper-tiny.en"))
    ports = dict.fromkeys((*spec.server_ports(up), *spec.CONTROL, *hearing.all_workers()), 9000)
    place = dataclasses.replace(place_of(up), ports=ports)

    pre, *hear = spec.worker_specs(up, hearing, place, SECRETS, {})

    assert pre.command[-1] == "fleet_preprocess"
    assert pre.environment["FLEET_PREPROCESS_KIND"] == "audio"
    assert [service.command[-1] for service in hear] == ["fleet_audio"] * 2
    assert hear[0].environment["FLEET_AUDIO_STAGE"] == "audio_transcribe"
    assert hear[0].environment["FLEET_AUDIO_MODEL_PATH"] == "/models/whisper"
    assert hear[0].environment["OMP_NUM_THREADS"] == "1"
    assert "FLEET_PREPROCESS_KIND" not in services()["preprocess-0"].environment
    assert {pool.stage for pool in spec.fleet_spec([hearing]).pools} == {Stage.PREPROCESS, Stage.AUDIO_TRANSCRIBE}


def test_a_folder_tells_whether_its_model_hears_or_speaks(tmp_path: Path) -> None:
    whisper, voices = tmp_path / "whisper", tmp_path / "voices"
    whisper.mkdir()
    voices.mkdir()
    for name in ("model.bin", "config.json", "vocabulary.json"):
        (whisper / name).write_text("{}")
    (voices / "heart.onnx").write_bytes(b"")

    up = UpSettings()
    assert Stage.AUDIO_TRANSCRIBE in model.named_model(up, str(whisper), None).replicas
    assert list(model.named_model(up, str(voices), None).replicas) == [Stage.AUDIO_SPEAK]
    assert Stage.AUDIO_TRANSCRIBE in model.named_model(up, "Systran/faster-whisper-small", None).replicas
    named = UpSettings(transcribe_model="org/ears")
    assert Stage.AUDIO_TRANSCRIBE in model.named_model(named, "org/ears", None).replicas


def test_audio_models_are_served_unless_they_are_named_empty() -> None:
    off = UpSettings(transcribe_model="", speech_model="")

    assert model.audio_sources(UpSettings()) == ("whisper-tiny.en", "hibari")
    assert model.audio_sources(off) == ()
    assert list(model.scripted_model(UpSettings(), "hibari").replicas) == [Stage.AUDIO_SPEAK]
    assert model.scripted_model(off, "hibari").takes_pictures
    speak, hear = example.audio_lines("http://x", "ears", "voice")
    assert "/v1/audio/speech" in speak
    assert "-F model=ears" in hear
    assert example.audio_lines("http://x", "", "") == []


def test_the_environment_is_read_with_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_DECODE_SLOTS", "3")
    monkeypatch.setenv("http_proxy", "http://proxy")

    variables = environment()

    assert variables["FLEET_DECODE_SLOTS"] == "3"
    assert inherited(variables)["http_proxy"] == "http://proxy"
    assert passed_on(variables, ("FLEET_DECODE_",))["FLEET_DECODE_SLOTS"] == "3"


def test_waiting_is_told_with_what_and_how_long() -> None:
    text = describe([Waiting("decode-0", "loading weights", 12.4), Waiting("ingress", "No model is served yet.", 3.0)])

    assert text == "waiting for decode-0 (loading weights, 12 s), ingress (No model is served yet, 3 s)"


def test_the_example_picture_is_a_picture() -> None:
    body = json.loads(example.picture_body("m"))

    assert body["messages"][0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert example.red_circle_png().startswith(b"\x89PNG")


def test_an_embedding_model_has_workers_of_its_own_and_none_of_the_language_models_arguments() -> None:
    up = UpSettings(decode_replicas=2)
    served = spec.embedding_model("emb", "/models/emb", "emb-123")
    place = place_of(up)
    place = dataclasses.replace(place, ports={**place.ports, **dict.fromkeys(served.all_workers(), 9900)})
    variables = {"FLEET_DECODE_ENGINE_ARGS": '{"max_model_len": 64}', "FLEET_DECODE_SLOTS": "3"}

    preprocess, decode = spec.worker_specs(up, served, place, SECRETS, variables)

    assert (preprocess.name, decode.name) == ("preprocess-emb-123-0", "decode-emb-123-0")
    assert decode.environment["FLEET_DECODE_RUNNER"] == "embed"
    assert (decode.environment["FLEET_DECODE_ENGINE_ARGS"], decode.environment["FLEET_DECODE_SLOTS"]) == ("{}", "3")
    assert not [name for name in decode.environment if name.startswith("VLLM_")]


def test_a_folder_says_that_its_model_makes_vectors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')

    assert model.named_model(UpSettings(), str(tmp_path), None) == spec.embedding_model(tmp_path.name, str(tmp_path))


def test_an_id_is_an_embedding_model_where_the_settings_say_so() -> None:
    up = UpSettings(embedding_model="org/some-embedder")

    assert model.named_model(up, "org/some-embedder", None).makes_vectors
    assert not model.named_model(up, "org/some-model-7b", None).makes_vectors


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "all-minilm-l6-v2"),
        ({"engine": "scripted"}, ""),
        ({"embedding_model": ""}, ""),
        ({"engine": "scripted", "embedding_model": "emb"}, "emb"),
    ],
)
def test_the_small_embedding_model_comes_with_real_engines(settings: dict[str, str], source: str) -> None:
    up = UpSettings(**settings)

    assert up.embedding_source == source
    assert model.scripted_model(up, source or "x").makes_vectors is bool(source)
