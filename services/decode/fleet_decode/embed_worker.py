"""Embeddings as the stage runner sees them: steps in, one tensor of vectors each out. Implements `BatchEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleet_common.errors import EngineDeadError, FleetError, InvalidInputError
from fleet_common.stage.port import Product, StepItem
from fleet_common.tensors.port import Array
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_contracts.embed import EmbedParams, EmbedResult
from fleet_decode.core.embed_batches import batches_by_length
from fleet_decode.engine.embed_port import Embedder, EmbedModel

#: Steps per call at most; what a call takes together is cut by tokens anyway.
_MAX_BATCH = 16


@dataclass(frozen=True, slots=True)
class _Job:
    """One step: its inputs, and how wide its vectors are."""

    inputs: tuple[Array, ...]
    dimensions: int


class EmbedEngine:
    """Embeds the inputs of several requests together, inputs of like length in one pass.

    Calls share the model pass by pass: a request of thousands of inputs does not hold a short one up.

    Args:
        embedder: the model.
        model: name under which clients ask for it.
        slots: steps held at once; a half of them may wait behind another call.
    """

    needs_root = False

    def __init__(self, embedder: Embedder, *, model: str, slots: int) -> None:
        self.max_batch = max(1, min(_MAX_BATCH, slots // 2))
        self._embedder = embedder
        self._name = model
        self._model: EmbedModel | None = None

    async def start(self) -> tuple[ModelCard, ...]:
        self._model = loaded = await self._embedder.start()
        return (
            ModelCard(
                model=self._name,
                input_modalities=(Modality.TEXT,),
                output_modalities=(Modality.EMBEDDING,),
                context_tokens=loaded.context_tokens,
                hidden_size=loaded.hidden_size,
                revision=loaded.revision,
                embedding_dimensions=loaded.dimensions,
            ),
        )

    async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
        if self._model is None:
            raise EngineDeadError("the embedder was not started")
        jobs = [_job(item, self._model) for item in items]
        good = [job for job in jobs if isinstance(job, _Job)]
        made = iter(await self._vectors(good))
        return [job if isinstance(job, FleetError) else _product(job, next(made)) for job in jobs]

    async def close(self) -> None:
        await self._embedder.close()

    async def _vectors(self, jobs: Sequence[_Job]) -> list[Array]:
        """One array of vectors per job."""
        inputs = [ids for job in jobs for ids in job.inputs]
        widths = [job.dimensions for job in jobs for _ in job.inputs]
        rows: dict[int, Array] = {}
        for batch in batches_by_length([len(ids) for ids in inputs], self._embedder.max_batch_tokens):
            vectors = await self._embedder.embed([inputs[i] for i in batch], [widths[i] for i in batch])
            rows.update(zip(batch, vectors, strict=True))
        in_order = iter([rows[index] for index in range(len(inputs))])
        return [np.stack([next(in_order) for _ in job.inputs]) for job in jobs]


def _job(item: StepItem, model: EmbedModel) -> _Job | FleetError:
    params = item.task.step.params
    if not isinstance(params, EmbedParams):
        return InvalidInputError("this model makes embeddings only", param="model")
    if params.dimensions not in (0, model.hidden_size, *model.dimensions):
        return InvalidInputError("this model has no vectors of that width", param="dimensions")
    prompt, lengths = _named(item, "prompt"), _named(item, "lengths")
    if prompt is None or lengths is None or not len(lengths) or int(lengths.sum()) != len(prompt):
        return InvalidInputError("the step has no inputs")
    return _Job(tuple(np.split(prompt, np.cumsum(lengths)[:-1])), params.dimensions)


def _named(item: StepItem, wanted: str) -> Array | None:
    return next((array for (_, name), array in item.tensors.items() if name == wanted), None)


def _product(job: _Job, vectors: Array) -> Product:
    num_tokens = sum(len(ids) for ids in job.inputs)
    return Product(tensors={"vectors": vectors}, result=EmbedResult(num_prompt_tokens=num_tokens))
