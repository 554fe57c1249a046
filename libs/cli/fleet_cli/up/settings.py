"""Settings of the local fleet, and what of the environment its processes get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

_DEFAULT_MODEL = "omnifleet-vlm"
_DEFAULT_DRAWING = "omnifleet-image"
_DEFAULT_HEARING = "whisper-tiny.en"
_DEFAULT_SPEAKING = "hibari"
_DEFAULT_EMBEDDING_MODEL = "all-minilm-l6-v2"

#: What a process needs of its surroundings; everything else stays outside.
_INHERITED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONPYCACHEPREFIX",
)  # fmt: skip
_INHERITED_PREFIXES = ("HF_", "CUDA_", "NVIDIA_", "VLLM_", "OMP_", "TORCH_", "NCCL_", "TRITON_")


def default_threads(num_processes: int) -> int:
    """Compute threads of each of so many model processes: the cores less one, on which the rest of the fleet runs."""
    return max(1, ((os.cpu_count() or 1) - 1) // max(1, num_processes))


class UpSettings(BaseSettings):
    """What `fleet up` is told: `FLEET_HTTP_PORT` and so on. Services' own variables pass through to them."""

    model_config = SettingsConfigDict(env_prefix="FLEET_", frozen=True, extra="ignore")

    http_host: str = Field("127.0.0.1", description="Address the ingress listens on.")
    http_port: int = Field(8080, description="Port of the ingress.", ge=1, le=65535)
    run_dir: Path = Field(Path(".fleet"), description="Folder of secrets, logs and broker files of this stack.")
    engine: str = Field("real", pattern="^(real|scripted)$", description="`scripted` needs no models.")
    connector: str = Field(
        "redis",
        pattern="^(redis|mooncake|yuanrong)$",
        description="Network store for tensors; its servers are started.",
    )
    chat_model: str = Field(
        _DEFAULT_MODEL, description="Name of a local model, Hugging Face id, or a folder; several with commas."
    )
    image_model: str = Field(
        _DEFAULT_DRAWING,
        description="A model that draws: a local model, Hugging Face id, or a diffusers folder; empty: none.",
    )
    transcribe_model: str = Field(
        _DEFAULT_HEARING,
        description="Whisper as CTranslate2 has it: a local model, Hugging Face id, or a folder; empty: none.",
    )
    speech_model: str = Field(
        _DEFAULT_SPEAKING, description="A local model, or a folder of Hibari voices; empty: none."
    )
    chat_lora: bool = Field(False, description="Leave room for LoRA adapters in the models of FLEET_CHAT_MODEL.")
    embedding_model: str | None = Field(
        None,
        description="Embedding model served besides, empty: none; default: the small local one, with real engines.",
    )
    pipelines: str | None = Field(
        None,
        description="Folder of pipelines, followed while it runs; default: those that come along; empty: none.",
    )
    model_cache: Path = Field(
        Path("~/.cache/omnifleet/models"), description="Where prepared local models are kept, for all stacks."
    )
    preprocess_replicas: int = Field(1, ge=1)
    vision_replicas: int = Field(1, ge=0, description="0: a model that takes no pictures.")
    decode_replicas: int = Field(1, ge=1)
    diffusion_replicas: int = Field(1, ge=1)
    transcribe_replicas: int = Field(1, ge=1)
    speak_replicas: int = Field(1, ge=1)
    decode_threads: int = Field(0, ge=0, description="Compute threads of one decode worker; 0: cores - 1, shared.")
    decode_kv_cache_gib: int = Field(1, ge=1, description="KV cache of one decode worker on a CPU.")
    unserve_s: float = Field(330.0, description="Longest time for the requests of a model that is unserved.", gt=0)
    stop_s: float = Field(10.0, gt=0, description="From Ctrl-C to the last process gone.")

    @property
    def embedding_source(self) -> str:
        """The embedding model, "" for none."""
        if self.embedding_model is not None:
            return self.embedding_model
        return _DEFAULT_EMBEDDING_MODEL if self.engine == "real" else ""


#: Variables of `UpSettings` that look like a service's own.
_SUPERVISOR_ONLY = frozenset(f"FLEET_{name.upper()}" for name in UpSettings.model_fields)


class _Everything(EnvSettingsSource):
    """The whole environment, case kept: the one place where it is read."""

    def __init__(self) -> None:
        super().__init__(UpSettings, case_sensitive=True)


def environment() -> Mapping[str, str]:
    """Variables of this process."""
    return {name: value for name, value in _Everything().env_vars.items() if value is not None}


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """What every child gets of its surroundings."""
    return {
        name: value for name, value in variables.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


def passed_on(variables: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """A service's own settings that the user set, such as `FLEET_DECODE_SLOTS`."""
    return {
        name: value for name, value in variables.items() if name.startswith(prefixes) and name not in _SUPERVISOR_ONLY
    }
