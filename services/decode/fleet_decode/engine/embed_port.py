"""What the decode service needs of a model that makes embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet_common.tensors.port import Array


@dataclass(frozen=True, slots=True)
class EmbedModel:
    """What an embedder has loaded.

    Attributes:
        context_tokens: longest input.
        hidden_size: width of its vectors.
        dimensions: smaller widths that its vectors may be cut to (Matryoshka training), none for most models.
        revision: identifies the weights.
    """

    context_tokens: int
    hidden_size: int
    dimensions: tuple[int, ...] = ()
    revision: str = ""


class Embedder(Protocol):
    """One vector per input."""

    max_batch_tokens: int

    async def start(self) -> EmbedModel:
        """Load the model; the loop goes on meanwhile. Raises EngineDeadError when it cannot be loaded."""

    async def embed(self, inputs: Sequence[Array], dimensions: Sequence[int]) -> Sequence[Array]:
        """Vectors float32 [dimensions] of the inputs, in order, from one pass through the model.

        Args:
            inputs: token ids int32 [num_tokens] each; together with their padding at most `max_batch_tokens`, or one.
            dimensions: width of each vector; 0 = the model's own.
        Raises:
            EngineOutOfMemoryError: the batch does not fit.
            EngineError: it failed.
        """

    async def close(self) -> None:
        """Stop. Idempotent."""
