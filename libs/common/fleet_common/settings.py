"""Settings every service shares, read from the environment once, frozen, unknown keys refused.

`FLEET_BUS__URL` fills `CommonSettings.bus.url`; each service adds its own class with the prefix `FLEET_<SERVICE>_`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from fleet_contracts.base import Stage


class Block(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BusSettings(Block):
    """How to reach the broker: one account for work, one for control (routing, registry, leader)."""

    url: str = Field("nats://127.0.0.1:4222", description="Broker address, `nats://` or `tls://`.")
    user: str = Field("worker", description="Role: worker, ingress, placement or admin.")
    work_password: SecretStr = Field(SecretStr(""), description="Password of `<user>` in the work account.")
    control_password: SecretStr = Field(SecretStr(""), description="Password of `<user>_control`.")
    tls_ca: Path | None = Field(None, description="CA file when the broker uses TLS.")
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 2.0
    pull_expires_s: float = Field(4.0, description="Life of a parked pull; below the ack wait, see `bus/pull.py`.")


class MooncakeSettings(Block):
    """A Mooncake store."""

    master_address: str = Field("", description="host:port of mooncake_master; empty: not used.")
    host: str = Field("127.0.0.1", description="Address of this host that storage nodes and peers reach.")
    transport: str = Field("tcp", description="tcp or rdma, or what else the library was built with.")
    devices: str = Field("", description="RDMA devices, comma separated.")
    segment_bytes: int = Field(0, description="Memory this process lends to the store; 0: storage nodes do.", ge=0)
    compression: str = Field("none", pattern="^(none|zlib)$", description="none or zlib.")
    timeout_s: float = Field(5.0, gt=0)


class YuanrongSettings(Block):
    """openYuanrong's data system."""

    worker_address: str = Field("", description="host:port of this host's datasystem_worker; empty: not used.")
    compression: str = Field("none", pattern="^(none|zlib)$", description="none or zlib.")
    timeout_s: float = Field(1.0, gt=0, description="The process stands still that long when the worker hangs.")


class StoreSettings(Block):
    """Where tensors go."""

    arena_dir: Path | None = Field(Path("/dev/shm"), description="Folder of shared-memory segments; None: no arena.")
    arena_namespace: str = Field("omnifleet", description="Prefix of segment names: one per stack on a host.")
    arena_bytes: int = Field(256 << 20, description="Bytes this process may preallocate.", ge=0)
    locality: str = Field("", description="Locality domain; empty: this host's boot id.")
    shm_threshold_bytes: int = Field(1024, description="Tensors up to this many bytes travel in the message.", ge=0)
    redis_url: SecretStr | None = Field(None, description="Network store, like redis://:password@host:6379/0.")
    redis_compression: str = Field("none", description="none or zlib.")
    redis_timeout_s: float = 5.0
    mooncake: MooncakeSettings = MooncakeSettings()  # type: ignore[call-arg]
    yuanrong: YuanrongSettings = YuanrongSettings()  # type: ignore[call-arg]
    network: str = Field("", description="Network store that takes the writes; empty: the first that has an address.")
    reaper_grace_s: float = Field(600.0, description="Age before a dead owner's segment may be removed.")


class TelemetrySettings(Block):
    """Logs, metrics, traces."""

    log_level: str = "info"
    log_json: bool = Field(True, description="JSON lines on stdout; false: for people.")
    metrics_port: int = Field(0, description="Loopback port of /metrics and /health of a worker; 0: any free port.")
    metrics_host: str = "127.0.0.1"
    otlp_endpoint: str = Field("", description="OTLP/HTTP traces endpoint; empty: no export.")


class RunnerSettings(Block):
    """The stage runner. Figures are the defaults of DESIGN section 5."""

    ack_wait_s: float = 6.0
    heartbeat_s: float = 2.0
    look_ahead_ratio: float = Field(4.0, description="Messages held beyond free slots, as a multiple of slots.")
    batch_timeout_s: float = Field(0.05, description="Longest wait for a fuller batch.")
    max_batch_bytes: int = Field(0, description="Input bytes per batch; 0: no bound.", ge=0)
    class_weights: dict[str, float] = Field(default_factory=lambda: {"realtime": 0.6, "batch": 0.3, "background": 0.1})
    aging_s: float = Field(30.0, description="A message older than this goes before every younger class.")
    max_deliver: int = 5
    lease_s: float = Field(4.0, description="Registry lease; renewed three times in that span.")
    drain_s: float = Field(8.0, description="Longest time to finish what runs after SIGTERM.")
    confirm_timeout_s: float = Field(2.0, description="Wait for the ingress's answer to a terminal event.")


class CommonSettings(BaseSettings):
    """Settings of every process of the fleet."""

    model_config = SettingsConfigDict(
        env_prefix="FLEET_",
        env_nested_delimiter="__",
        frozen=True,
        extra="ignore",
        nested_model_default_partial_update=True,
    )

    bus: BusSettings = BusSettings()  # type: ignore[call-arg]
    store: StoreSettings = StoreSettings()  # type: ignore[call-arg]
    telemetry: TelemetrySettings = TelemetrySettings()  # type: ignore[call-arg]
    runner: RunnerSettings = RunnerSettings()  # type: ignore[call-arg]


class UnknownSettingError(ValueError):
    """A variable with a service's prefix that the service does not know."""


class _KnownOnly(EnvSettingsSource):
    """Environment source that refuses misspelt variables of its prefix."""

    def __call__(self) -> dict[str, Any]:
        prefix = self.env_prefix.lower()
        known = {f"{prefix}{name}" for name in self.settings_cls.model_fields}
        for variable in self.env_vars:
            head = variable.split("__", 1)[0]
            if variable.startswith(prefix) and head not in known:
                raise UnknownSettingError(f"unknown setting {variable.upper()}")
        return super().__call__()


class ServiceSettings(BaseSettings):
    """Base of a service's own settings; subclasses set `env_prefix`."""

    model_config = SettingsConfigDict(env_nested_delimiter="__", frozen=True, extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, _KnownOnly(settings_cls))


class WorkerSettings(ServiceSettings):
    """What every worker of a stage is told."""

    worker_id: str = Field("", description="Stable name, like decode-0; empty: stage + random.")
    pool: str = Field(description="Pool this worker serves.")
    model: str = Field(description="Name under which clients ask for the model.")
    model_path: str = Field("", description="Folder or Hugging Face id of the weights.")
    engine: str = Field("real", description="`real`, or `scripted` for tests and load work.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Passed to the engine untouched.")
    slots: int = Field(8, description="Items run at once.", ge=1)


def stage_prefix(stage: Stage) -> str:
    """Environment prefix of a stage's service: `FLEET_VISION_` for `vision_encode`."""
    return f"FLEET_{stage.value.split('_')[0].upper()}_"
