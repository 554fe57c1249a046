"""What a local fleet consists of: processes, their environment, how to tell that each is ready. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from fleet_cli.errors import CliError
from fleet_cli.pipelines import pipelines_folder
from fleet_cli.up.leftovers import MARK
from fleet_cli.up.settings import UpSettings, default_threads, inherited, passed_on
from fleet_cli.up.stores import STORE_PORTS, StoreServer, store_environment
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import FleetSpec, PoolSpec
from fleet_decode.engine.environment import decode_environment

#: Variables every service understands; set by the user, they reach all of them.
_COMMON_PREFIXES = ("FLEET_RUNNER__", "FLEET_TELEMETRY__", "FLEET_STORE__")

#: Ingress, then workers: within `stop_s` together, with time left for the rest.
_INGRESS_DRAIN_S = 4
_WORKER_DRAIN_S = 3

#: A scripted decoder takes the pictures of the scripted encoder.
_SCRIPTED_DECODE = '{"hidden_size": 576, "image_tokens": 16}'

#: Of a model's name in the names of its pools, which may have 40 characters.
_READABLE_CHARACTERS = 10

#: Services that are not called like their stage.
_SERVICES = {
    Stage.VISION_ENCODE: "vision",
    Stage.AUDIO_TRANSCRIBE: "audio",
    Stage.AUDIO_SPEAK: "audio",
    Stage.DIFFUSION_GENERATE: "diffusion",
}

#: Processes that belong to no model and need a port.
CONTROL = ("placement", "ingress")

ROLES = ("worker", "ingress", "placement", "admin")


class StopRank(IntEnum):
    """Order in which processes are stopped: one rank after another, together within a rank."""

    INGRESS = 0
    WORKER = 1
    PLACEMENT = 2
    SERVER = 3


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One child.

    Attributes:
        ready_url: answers 200 once it can work; "" for servers, which are ready when they listen on `port`.
        ready_path: and, unless None, when this file exists.
        needs: servers that must be ready before it is started.
        waits_for: what it does at first, for people.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    port: int
    rank: StopRank
    ready_url: str = ""
    waits_for: str = "starting"
    ready_path: Path | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One of the models a fleet serves, and what it runs on.

    Attributes:
        name: what clients call it.
        path: folder or Hugging Face id.
        replicas: workers of each stage, in the order in which a request passes them; its pools are its own.
        engine_args: of the engines of a stage, on top of what the user's environment says.
        group: part of the names of its pools and workers; "" for the first model, whose names are the plain ones.
        max_adapter_rank: of its LoRA adapters; 0: it takes none.
        makes_vectors: it makes embeddings, not text.
    """

    name: str
    path: str
    replicas: Mapping[Stage, int]
    engine_args: Mapping[Stage, Mapping[str, Any]] = field(default_factory=dict)
    group: str = ""
    max_adapter_rank: int = 0
    makes_vectors: bool = False
    sees: bool = True

    @property
    def takes_pictures(self) -> bool:
        """Whether it has vision workers, and not to hear with."""
        return self.sees and self.replicas.get(Stage.VISION_ENCODE, 0) > 0

    def pool(self, stage: Stage) -> str:
        """Name of its pool at a stage."""
        return f"{self._stem(stage)}-cpu"

    def workers(self, stage: Stage) -> tuple[str, ...]:
        """Names of its workers at a stage."""
        return tuple(f"{self._stem(stage)}-{index}" for index in range(self.replicas.get(stage, 0)))

    def all_workers(self) -> tuple[str, ...]:
        """Names of all its workers."""
        return tuple(name for stage in self.replicas for name in self.workers(stage))

    def _stem(self, stage: Stage) -> str:
        return f"{service_of(stage)}-{self.group}" if self.group else service_of(stage)


def chat_model(
    settings: UpSettings, name: str, path: str, *, takes_pictures: bool, takes_audio: bool = False, group: str = ""
) -> ServedModel:
    """A language model, with a tower that sees or hears or without, on as many workers as the settings say."""
    replicas = {Stage.PREPROCESS: settings.preprocess_replicas}
    if (takes_pictures or takes_audio) and settings.vision_replicas:
        replicas[Stage.VISION_ENCODE] = settings.vision_replicas
    replicas[Stage.DECODE] = settings.decode_replicas
    return ServedModel(name, path, replicas, group=group, sees=takes_pictures)


def drawing_model(settings: UpSettings, name: str, path: str, group: str = "") -> ServedModel:
    """A model that makes pictures, and who decodes those that it edits."""
    replicas = {Stage.PREPROCESS: 1, Stage.DIFFUSION_GENERATE: settings.diffusion_replicas}
    return ServedModel(name, path, replicas, group=group)


def hearing_model(settings: UpSettings, name: str, path: str, group: str = "") -> ServedModel:
    """A model that transcribes, and who decodes files for it."""
    replicas = {Stage.PREPROCESS: 1, Stage.AUDIO_TRANSCRIBE: settings.transcribe_replicas}
    return ServedModel(name, path, replicas, group=group)


def speaking_model(settings: UpSettings, name: str, path: str, group: str = "") -> ServedModel:
    """A model that reads aloud."""
    return ServedModel(name, path, {Stage.AUDIO_SPEAK: settings.speak_replicas}, group=group)


def embedding_model(name: str, path: str, group: str = "") -> ServedModel:
    """A model that makes embeddings: light enough for one worker of each of its stages."""
    return ServedModel(name, path, {Stage.PREPROCESS: 1, Stage.DECODE: 1}, group=group, makes_vectors=True)


def group_name(model: str) -> str:
    """The group of a model that is not the first: readable, usable in every name, and no other model's."""
    readable = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:_READABLE_CHARACTERS].strip("-")
    return f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:6]}"


@dataclass(frozen=True, slots=True)
class Secrets:
    """Passwords by user of the broker (`worker`, `worker_control`, ...), and the store's."""

    bus: Mapping[str, str] = field(repr=False)
    store: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stack lives.

    Attributes:
        python: interpreter that runs the services.
        namespace: prefix of its shared-memory segments.
        ports: by process name.
        connector: network store that takes the writes.
    """

    run_dir: Path
    python: str
    namespace: str
    ports: Mapping[str, int]
    connector: str = "redis"

    @property
    def bus_url(self) -> str:
        return f"nats://127.0.0.1:{self.ports['nats-server']}"

    def adapters_dir(self, model: ServedModel) -> Path:
        """Where the decode workers of a model find its adapters."""
        return self.run_dir / "adapters" / (model.group or "first")

    @property
    def store_port(self) -> int:
        """Port of the network store that services talk to."""
        return self.ports[STORE_PORTS[self.connector][0]]


def server_ports(settings: UpSettings) -> tuple[str, ...]:
    """Names of the ports of broker and store."""
    return ("nats-server", *STORE_PORTS[settings.connector])


def fleet_spec(models: Iterable[ServedModel]) -> FleetSpec:
    """Pools and workers, for `bus apply`."""
    return FleetSpec(
        pools=tuple(
            PoolSpec(
                stage=stage,
                pool=model.pool(stage),
                model=model.name,
                workers=tuple(WorkerId(name) for name in model.workers(stage)),
            )
            for model in models
            for stage in model.replicas
        )
    )


def control_specs(
    settings: UpSettings, place: Place, secrets: Secrets, variables: Mapping[str, str]
) -> tuple[ProcessSpec, ...]:
    """The processes that need broker and store and belong to no model: placement and ingress."""
    return (_placement_spec(place, secrets, variables), _ingress_spec(settings, place, secrets, variables))


def worker_specs(
    settings: UpSettings, model: ServedModel, place: Place, secrets: Secrets, variables: Mapping[str, str]
) -> tuple[ProcessSpec, ...]:
    """The workers of one model."""
    return tuple(
        _worker_spec(settings, model, place, secrets, (stage, name), variables)
        for stage in model.replicas
        for name in model.workers(stage)
    )


def server_specs(
    place: Place, nats_binary: Path, store: tuple[StoreServer, ...], variables: Mapping[str, str]
) -> tuple[ProcessSpec, ...]:
    """Broker and store in the order of their start; their files lie in the run folder."""
    broker = StoreServer("nats-server", (str(nats_binary), "-c", str(place.run_dir / "nats.conf")))
    return tuple(
        ProcessSpec(
            name=server.name,
            command=server.command,
            environment={**inherited(variables), **server.environment, MARK: place.namespace},
            port=place.ports[server.name],
            rank=StopRank.SERVER,
            waits_for="listening",
            ready_path=server.ready_path,
            needs=server.needs,
        )
        for server in (broker, *store)
    )


def valkey_config(place: Place, password: str) -> str:
    """Loopback, with a password, nothing on disk; the oldest tensors go first when it is full."""
    return "\n".join(
        (
            "bind 127.0.0.1",
            f"port {place.ports['valkey-server']}",
            f"requirepass {password}",
            f"dir {place.run_dir}",
            'save ""',
            "appendonly no",
            "daemonize no",
            # Its title is written over its environment, and with it over the mark of the stack.
            "set-proc-title no",
            "maxmemory 512mb",
            "maxmemory-policy volatile-ttl",
            "",
        )
    )


def service_of(stage: Stage) -> str:
    """Name of the service that works at a stage."""
    return _SERVICES.get(stage, stage.value)


def _common(place: Place, secrets: Secrets, role: str, name: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of a service: its surroundings, the common settings, what the user set, then what has to be."""
    return {
        **inherited(variables),
        MARK: place.namespace,
        "PYTHONUNBUFFERED": "1",
        "FLEET_RUNNER__DRAIN_S": str(_WORKER_DRAIN_S),
        **passed_on(variables, _COMMON_PREFIXES),
        "FLEET_BUS__URL": place.bus_url,
        "FLEET_BUS__USER": role,
        "FLEET_BUS__WORK_PASSWORD": secrets.bus[role],
        "FLEET_BUS__CONTROL_PASSWORD": secrets.bus[f"{role}_control"],
        **store_environment(place.connector, place.ports, secrets.store, place.run_dir / "logs"),
        "FLEET_STORE__ARENA_NAMESPACE": place.namespace,
        "FLEET_TELEMETRY__METRICS_HOST": "127.0.0.1",
        "FLEET_TELEMETRY__METRICS_PORT": str(place.ports[name]),
    }


def _worker_spec(
    settings: UpSettings,
    model: ServedModel,
    place: Place,
    secrets: Secrets,
    worker: tuple[Stage, str],
    variables: Mapping[str, str],
) -> ProcessSpec:
    stage, name = worker
    prefix = f"FLEET_{service_of(stage).upper()}_"
    environment = {
        **_engine_environment(settings, model, stage),
        **_common(place, secrets, "worker", name, variables),
        f"{prefix}ENGINE": settings.engine,
        **passed_on(variables, (prefix,)),
        f"{prefix}WORKER_ID": name,
        f"{prefix}POOL": model.pool(stage),
        f"{prefix}MODEL": model.name,
        f"{prefix}MODEL_PATH": model.path,
    }
    if service_of(stage) == "audio":
        environment["FLEET_AUDIO_STAGE"] = stage.value
    if stage == Stage.PREPROCESS and Stage.AUDIO_TRANSCRIBE in model.replicas:
        environment["FLEET_PREPROCESS_KIND"] = "audio"
    if stage == Stage.PREPROCESS and Stage.DIFFUSION_GENERATE in model.replicas:
        environment["FLEET_PREPROCESS_KIND"] = "picture"
    if model.makes_vectors and stage == Stage.DECODE:
        # Engine arguments that the user set are those of the language models.
        environment |= {"FLEET_DECODE_RUNNER": "embed", "FLEET_DECODE_ENGINE_ARGS": "{}"}
    if model.max_adapter_rank and stage == Stage.DECODE:
        environment["FLEET_DECODE_ADAPTERS_DIR"] = str(place.adapters_dir(model))
    if own := model.engine_args.get(stage):
        environment[f"{prefix}ENGINE_ARGS"] = _merged(environment.get(f"{prefix}ENGINE_ARGS", "{}"), own)
    return ProcessSpec(
        name=name,
        command=(place.python, "-m", f"fleet_{service_of(stage)}"),
        environment=environment,
        port=place.ports[name],
        rank=StopRank.WORKER,
        ready_url=f"http://127.0.0.1:{place.ports[name]}/health/ready",
        waits_for="loading weights" if settings.engine == "real" and stage != Stage.PREPROCESS else "starting",
    )


def _merged(given: str, own: Mapping[str, Any]) -> str:
    """Engine arguments of all workers of a stage with a model's own on top. Raises CliError."""
    try:
        return json.dumps({**json.loads(given), **own})
    except (ValueError, TypeError) as err:
        raise CliError(f"engine arguments are no JSON object: {given[:200]}") from err


def _engine_environment(settings: UpSettings, model: ServedModel, stage: Stage) -> dict[str, str]:
    """What the engine of a stage needs besides its settings; the user's own values win."""
    if settings.engine != "real":
        return {"FLEET_DECODE_ENGINE_ARGS": _SCRIPTED_DECODE} if stage == Stage.DECODE else {}
    if stage == Stage.DECODE and not model.makes_vectors:
        threads = settings.decode_threads or default_threads(model.replicas[Stage.DECODE])
        return decode_environment(model.path, threads, settings.decode_kv_cache_gib)
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model.path).is_dir() else {}
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **offline}


def _placement_spec(place: Place, secrets: Secrets, variables: Mapping[str, str]) -> ProcessSpec:
    return ProcessSpec(
        name="placement",
        command=(place.python, "-m", "fleet_placement"),
        environment={
            **_common(place, secrets, "placement", "placement", variables),
            **passed_on(variables, ("FLEET_PLACEMENT_",)),
        },
        port=place.ports["placement"],
        rank=StopRank.PLACEMENT,
        ready_url=f"http://127.0.0.1:{place.ports['placement']}/health/ready",
    )


def _pipelines_environment(settings: UpSettings) -> dict[str, str]:
    folder = pipelines_folder(settings.pipelines)
    return {"FLEET_INGRESS_PIPELINES_DIR": str(folder)} if folder is not None else {}


def _ingress_spec(settings: UpSettings, place: Place, secrets: Secrets, variables: Mapping[str, str]) -> ProcessSpec:
    host = "127.0.0.1" if settings.http_host in ("0.0.0.0", "::") else settings.http_host
    return ProcessSpec(
        name="ingress",
        command=(place.python, "-m", "fleet_ingress"),
        environment={
            **_common(place, secrets, "ingress", "ingress", variables),
            "FLEET_INGRESS_DRAIN_S": str(_INGRESS_DRAIN_S),
            **passed_on(variables, ("FLEET_INGRESS_",)),
            **_pipelines_environment(settings),
            "FLEET_INGRESS_HTTP_HOST": settings.http_host,
            "FLEET_INGRESS_HTTP_PORT": str(settings.http_port),
        },
        port=settings.http_port,
        rank=StopRank.INGRESS,
        ready_url=f"http://{host}:{settings.http_port}/health/ready",
        waits_for="every stage of the model",
    )
