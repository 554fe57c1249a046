"""What an engine of a stage looks like to the stage runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fleet_common.errors import FleetError
from fleet_common.tensors.port import Array
from fleet_contracts.control import ModelCard
from fleet_contracts.decode import TokenLogprob
from fleet_contracts.events import Attempt, ChoiceProgress, Usage
from fleet_contracts.preprocess import MediaItem
from fleet_contracts.tensors import TensorRef
from fleet_contracts.work import StepResult, StepTask


@dataclass(frozen=True, slots=True)
class StepItem:
    """One step to run, inputs opened.

    Attributes:
        task: the work item.
        attempt: which delivery this is.
        tensors: read-only views by (step id, tensor name); valid until the runner has settled the item.
        root: bytes of the client's body for stages that asked for it (preprocess), else b"".
    """

    task: StepTask
    attempt: Attempt
    tensors: Mapping[tuple[str, str], Array]
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class Product:
    """What a step made. The runner puts the arrays into the store.

    Attributes:
        tensors: C-contiguous arrays by name; `dtypes` names what numpy cannot (`bfloat16`), `hashes` the content.
        num_cached: items that came from a cache.
    """

    tensors: Mapping[str, Array]
    result: StepResult | None = None
    media: tuple[MediaItem, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)


class BatchEngine(Protocol):
    """Runs several steps in one call (preprocess, vision).

    `cost_bytes` and `max_batch` bound what the composer puts together; `run` is awaited off the hot path of the loop
    (an engine does its work in threads or processes).
    """

    max_batch: int
    needs_root: bool

    async def start(self) -> tuple[ModelCard, ...]:
        """Load; returns a card per model served."""

    async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
        """One result per item, in order. An exception is the whole batch's: the runner bisects."""

    async def close(self) -> None: ...


class TokenSink(Protocol):
    """Where a streaming engine writes. Calls raise CancelledWorkError once nobody waits any more."""

    async def tokens(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """New tokens of a choice; index, text offset and sequence number are the sink's business."""

    async def chunk(self, media_type: str, data: bytes, *, is_last: bool = False) -> None:
        """One whole medium of the answer (a sentence of speech, a passage of a transcript), of any size.

        Args:
            is_last: no other follows, where that is known.
        """

    @property
    def is_cancelled(self) -> bool:
        """True once the client is gone, the deadline has passed or another attempt holds the stream."""

    def resume_point(self) -> Sequence[ChoiceProgress]:
        """What the client side already has, per choice; empty for a first attempt.

        The first choice also tells how many media (`chunk`) it has.
        """

    async def picture(
        self, data: bytes, *, choice: int, index: int, media_type: str, size: tuple[int, int], is_final: bool
    ) -> None:
        """A picture file of a choice, kept in the store and told by reference; `size`: width, height in pixels.

        `index` counts the pictures of the choice, partial ones first; every attempt makes the same at the same index.
        """

    async def progress(self, done_ratio: float) -> None:
        """Share of the request that is done, 0-1."""

    async def keep(self, array: Array) -> TensorRef:
        """Park an array in the store until the request's deadline. Raises StoreError."""

    async def fetch(self, ref: TensorRef) -> Array:
        """A copy of what was parked. Raises TensorNotFoundError, StoreError."""

    async def forget(self, ref: TensorRef) -> None:
        """What was parked is needed no more. Raises StoreError."""


@runtime_checkable
class StreamEngine(Protocol):
    """Runs steps side by side, each streaming tokens, media or pictures. `slots` bounds how many."""

    slots: int
    needs_root: bool

    async def start(self) -> tuple[ModelCard, ...]: ...

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        """Generate everything to its end through `sink`.

        Raises:
            CancelledWorkError: the sink said so; engine state of the request is freed.
            EngineDeadError: nothing can run any more.
        """

    def running(self) -> int:
        """Sequences the engine runs right now: reported as batch size."""

    async def close(self) -> None: ...


@runtime_checkable
class ObservedEngine(Protocol):
    """An engine that can also die or hang while it runs nothing; the host asks it every second."""

    def is_alive(self) -> bool:
        """False once nothing can run any more: the worker leaves, for its supervisor to replace it."""

    def is_responsive(self) -> bool:
        """False while the engine hangs: the worker is not ready, and ready again when it goes on."""

    def kv_cache_usage_ratio(self) -> float:
        """Share of the KV cache in use, 0-1."""


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that keeps LoRA adapters in memory; the host tells the fleet which."""

    def adapters(self) -> tuple[str, ...]:
        """Their names."""
