"""An embedder without a model, for tests and load work: vectors depend on the token ids, and on nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fleet_common.errors import EngineError
from fleet_common.tensors.port import Array
from fleet_decode.engine.embed_port import EmbedModel

_NONE = -1


class ScriptedEmbedArgs(BaseModel):
    """`engine_args` of the scripted embedder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(32, description="Width of the vectors.", ge=1)
    context_tokens: int = Field(256, description="Longest input.", ge=1)
    dimensions: tuple[int, ...] = Field((), description="Smaller widths.")
    max_batch_tokens: int = Field(4096, description="Tokens of a pass, padding included.", ge=1)
    delay_s: float = Field(0.0, description="Wait of each pass.", ge=0)
    fault_token: int = Field(_NONE, description="A pass over an input with that id raises EngineError; -1: none.")


class ScriptedEmbedder:
    """Counts of token ids, folded into the width and scaled to length 1: equal ids, equal vectors."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        self._args = ScriptedEmbedArgs.model_validate(dict(engine_args))
        self.max_batch_tokens = self._args.max_batch_tokens
        self.num_passes = 0

    async def start(self) -> EmbedModel:
        args = self._args
        return EmbedModel(args.context_tokens, args.hidden_size, args.dimensions, "scripted")

    async def embed(self, inputs: Sequence[Array], dimensions: Sequence[int]) -> Sequence[Array]:
        self.num_passes += 1
        await asyncio.sleep(self._args.delay_s)
        if any(self._args.fault_token in ids for ids in inputs):
            raise EngineError("the scripted embedder failed as told")
        return [self._vector(ids, width) for ids, width in zip(inputs, dimensions, strict=True)]

    async def close(self) -> None:
        """Nothing to stop."""

    def _vector(self, ids: Array, width: int) -> Array:
        counts = np.bincount(ids % self._args.hidden_size, minlength=self._args.hidden_size).astype(np.float32)
        cut = counts[: width or self._args.hidden_size]
        return np.asarray(cut / max(float(np.linalg.norm(cut)), 1e-12), dtype=np.float32)
