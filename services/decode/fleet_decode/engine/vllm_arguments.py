"""What is told to vLLM about a model: this service's defaults beneath the operator's `engine_args`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_common.checkpoints import checkpoint_revision, read_json
from fleet_common.errors import InvalidInputError
from fleet_contracts.base import Modality
from fleet_decode.engine.families import DecodeFamily, decode_family

#: Prompt tokens per step on a CPU: about a second of a small model on one core.
_CPU_STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's `config.json` says.

    Attributes:
        family: how media go in; None for text models.
        image_token_id, audio_token_id: placeholder of such a medium in the prompt, None where the model takes none. A
            video has an image's.
        video_token_id: what vLLM wants in its place, where it takes videos as such.
        image_tokens: tokens per image where the configuration names it, else 0.
        revision: identifies the weights.
    """

    family: DecodeFamily | None
    image_token_id: int | None
    image_tokens: int
    revision: str
    audio_token_id: int | None = None
    video_token_id: int | None = None

    @property
    def takes(self) -> tuple[Modality, ...]:
        """Kinds of media whose embeddings can be part of a prompt."""
        kinds = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
        return tuple(kind for kind in kinds if self.family is not None and self._places.get(kind) is not None)

    @property
    def _places(self) -> Mapping[str, int | None]:
        return {"image": self.image_token_id, "video": self.image_token_id, "audio": self.audio_token_id}

    def token_id(self, kind: str) -> int:
        """Placeholder of a kind of media. InvalidInputError where the model takes none."""
        token_id = self._places.get(kind)
        if token_id is None:
            raise InvalidInputError(f"this model takes no {kind}")
        return token_id


def model_facts(folder: Path) -> ModelFacts:
    """Read a model's folder (`config.json`, and samples of the weights for the revision).

    Raises:
        ValueError: a family of multimodal models that is not in the table.
    """
    config = read_json(folder, "config.json")
    image_token_id = config.get("image_token_index", config.get("image_token_id"))
    audio_token_id = config.get("audio_token_index", config.get("audio_token_id"))
    video_token_id = config.get("video_token_id")
    return ModelFacts(
        family=decode_family(config),
        image_token_id=None if image_token_id is None else int(image_token_id),
        image_tokens=int(config.get("image_seq_length") or 0) if config.get("model_type") == "llava" else 0,
        revision=checkpoint_revision(folder),
        audio_token_id=None if audio_token_id is None else int(audio_token_id),
        video_token_id=None if video_token_id is None else int(video_token_id),
    )


def engine_arguments(
    model_path: str, *, slots: int, facts: ModelFacts, is_cpu: bool, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`: whatever the operator names wins, key by key.

    Args:
        slots: requests the worker runs at once.
        is_cpu: vLLM runs on a CPU here.
        given: `engine_args` of the settings.
    """
    arguments: dict[str, Any] = {
        "model": model_path,
        "max_num_seqs": slots,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_log_requests": False,
        # Left free, a small model fills the gaps of JSON with blanks until its tokens run out.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    if facts.family is not None:
        # Embeddings come from the vision stage: with a limit of 0 vLLM does not even load the tower.
        arguments |= {"enable_mm_embeds": True, "limit_mm_per_prompt": dict.fromkeys(facts.family.media, 0)}
        # Embeddings are cached by the vision stage. vLLM's own cache would keep 4 GiB more of them, and its two halves
        # (here and in the engine core) drift apart when requests are cancelled.
        arguments |= {"mm_processor_cache_gb": 0}
        arguments |= {"mm_processor_kwargs": dict(facts.family.processor_kwargs)}
    if is_cpu:
        # bfloat16 is emulated on most CPUs; compiling costs minutes at start; "uni" saves a process and its imports.
        arguments |= {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"}
        # One step of a long prompt holds up every other sequence, and the answer to "are you alive?".
        arguments |= {"max_num_batched_tokens": _CPU_STEP_TOKENS}
    return arguments | dict(given)
