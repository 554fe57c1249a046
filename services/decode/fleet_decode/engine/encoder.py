"""Embeddings from any encoder that transformers loads: pooled and scaled as the checkpoint's own files say.

In torch beside the loop rather than in vLLM: see docs/adr/0006.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModel

from fleet_common.checkpoints import checkpoint_revision, locate_checkpoint, max_input_tokens, read_json
from fleet_common.errors import EngineDeadError, EngineError, EngineOutOfMemoryError
from fleet_common.tensors.port import Array
from fleet_decode.engine.embed_port import EmbedModel
from fleet_decode.engine.thread import DaemonThread

Pooling = Literal["mean", "cls", "last", "max"]

_PATTERNS = ("*.json", "*.safetensors", "1_Pooling/*", "2_*/*")
#: Names of sentence-transformers' 1_Pooling/config.json, older and newer.
_POOLING_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_POOLING_MODES: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "max": "max"}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


class EncoderArgs(BaseModel):
    """`engine_args` of the real embedder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pooling: Pooling | None = Field(None, description="How vectors of tokens become one; None: as the files say.")
    normalize: bool | None = Field(None, description="Scale vectors to length 1; None: as the files say.")
    max_batch_tokens: int = Field(4096, description="Tokens of a pass, padding included.", ge=1)
    device: str = Field("", description="Like cuda:0; empty: a GPU where there is one.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of weights and arithmetic.")
    threads: int = Field(0, description="Compute threads; 0: as torch (OMP_NUM_THREADS) has it.", ge=0)


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """What the files of a checkpoint say of its vectors."""

    pooling: Pooling
    is_normalized: bool


def read_pooling(folder: Path) -> PoolingRule:
    """From modules.json; a bare encoder is averaged over its tokens and scaled to length 1.

    Raises:
        ValueError: a module or a pooling that is not known here: other vectors would be wrong vectors.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return PoolingRule("mean", is_normalized=True)
    modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in json.loads(path.read_text())}
    unknown = sorted(set(modules) - set(_KNOWN_MODULES))
    if unknown:
        raise ValueError(f"modules.json has modules that are not supported: {', '.join(unknown)}")
    config = read_json(folder / modules["Pooling"], "config.json") if "Pooling" in modules else {}
    named = {_POOLING_MODES[config["pooling_mode"]]} if config.get("pooling_mode") in _POOLING_MODES else set()
    named |= {mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)}
    if len(named) != 1 or config.get("pooling_mode_mean_sqrt_len_tokens"):
        raise ValueError("the checkpoint's pooling is none of mean, cls, last token and max")
    return PoolingRule(named.pop(), is_normalized="Normalize" in modules)


class TransformersEmbedder:
    """A model of transformers' `AutoModel`, run in a thread of its own.

    Args:
        name_or_path: model folder or Hugging Face id.
        engine_args: see `EncoderArgs`.
    """

    def __init__(self, name_or_path: str, engine_args: Mapping[str, Any]) -> None:
        self._args = EncoderArgs.model_validate(dict(engine_args))
        self._name_or_path = name_or_path
        self.max_batch_tokens = self._args.max_batch_tokens
        self._thread = DaemonThread("encoder")
        self._model: Any = None
        self._rule = PoolingRule("mean", is_normalized=True)
        self._device = "cpu"

    async def start(self) -> EmbedModel:
        try:
            return await self._thread.run(self._load)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise EngineDeadError(f"the model could not be loaded: {error}") from error

    async def embed(self, inputs: Sequence[Array], dimensions: Sequence[int]) -> Sequence[Array]:
        try:
            return await self._thread.run(lambda: self._embed(inputs, dimensions))
        except torch.OutOfMemoryError as error:
            raise EngineOutOfMemoryError(f"{len(inputs)} inputs do not fit the device") from error
        except RuntimeError as error:
            raise EngineError(f"the model failed: {error}") from error

    async def close(self) -> None:
        self._thread.stop()

    def _load(self) -> EmbedModel:
        args = self._args
        if args.threads:
            torch.set_num_threads(args.threads)
        self._device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        folder = locate_checkpoint(self._name_or_path, _PATTERNS)
        found = read_pooling(folder)
        self._rule = PoolingRule(
            args.pooling or found.pooling,
            is_normalized=found.is_normalized if args.normalize is None else args.normalize,
        )
        model = AutoModel.from_pretrained(folder, dtype=getattr(torch, args.dtype), local_files_only=True)
        self._model = model.eval().to(self._device)
        config = read_json(folder, "config.json")
        return EmbedModel(
            context_tokens=max_input_tokens(folder),
            hidden_size=int(model.config.hidden_size),
            dimensions=tuple(int(width) for width in config.get("matryoshka_dimensions") or ()),
            revision=checkpoint_revision(folder),
        )

    def _embed(self, inputs: Sequence[Array], dimensions: Sequence[int]) -> Sequence[Array]:
        width = max(len(ids) for ids in inputs)
        padded = np.zeros((len(inputs), width), dtype=np.int64)
        mask = np.zeros((len(inputs), width), dtype=np.int64)
        for row, ids in enumerate(inputs):
            padded[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        attended = torch.from_numpy(mask).to(self._device)
        tokens = torch.from_numpy(padded).to(self._device)
        with torch.inference_mode():
            states = self._model(input_ids=tokens, attention_mask=attended).last_hidden_state.float()
            pooled = pool(states, attended, self._rule.pooling)
            return [self._finished(pooled[row], size) for row, size in enumerate(dimensions)]

    def _finished(self, vector: torch.Tensor, size: int) -> Array:
        cut = vector[:size] if size else vector
        if self._rule.is_normalized:
            cut = torch.nn.functional.normalize(cut, dim=-1)
        made: Array = cut.cpu().numpy()
        return made


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector per input.

    Args:
        states: float [batch, num_tokens, hidden_size].
        mask: int64 [batch, num_tokens], 1 where there is a token (left of the padding).
    Returns:
        float [batch, hidden_size].
    """
    match pooling:
        case "cls":
            return states[:, 0]
        case "last":
            return states[torch.arange(len(states), device=states.device), mask.sum(dim=1) - 1]
        case "max":
            return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)
