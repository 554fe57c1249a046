"""Scripted engines for tests of the runner: real implementations of the ports that do what a test tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from fleet_common.errors import CancelledWorkError, FleetError
from fleet_common.stage.port import Product, StepItem, TokenSink
from fleet_contracts.base import Stage
from fleet_contracts.control import ModelCard
from fleet_contracts.events import Usage
from fleet_contracts.vision import VisionParams

Behaviour = Callable[[StepItem], Product | FleetError]


def default_product(item: StepItem) -> Product:
    """Tensors named as the stage's contract wants them: a prompt and two pictures, or embeddings."""
    step = item.task.step
    if step.stage is Stage.PREPROCESS:
        pixels = {f"pixels{n}": np.full((3, 32, 32), n, dtype=np.uint8) for n in range(2)}
        return Product(tensors={"prompt": np.arange(4, dtype=np.int32), **pixels})
    items = step.params.items if isinstance(step.params, VisionParams) else (0,)
    return Product(tensors={f"embeds{n}": np.full((64, 16), n, dtype=np.float32) for n in items})


class ScriptedBatchEngine:
    """A batch engine.

    Args:
        behaviour: what to do with each item; what it raises is the whole batch's.
        gate: awaited before each call, when given.
    """

    def __init__(
        self,
        behaviour: Behaviour = default_product,
        *,
        max_batch: int = 4,
        needs_root: bool = False,
        gate: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.max_batch = max_batch
        self.needs_root = needs_root
        self.calls: list[list[StepItem]] = []
        self._behaviour = behaviour
        self._gate = gate

    async def start(self) -> tuple[ModelCard, ...]:
        return (ModelCard(model="m"),)

    async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
        self.calls.append(list(items))
        if self._gate is not None:
            await self._gate()
        return [self._behaviour(item) for item in items]

    async def close(self) -> None:
        """Nothing to free."""

    def batch_sizes(self) -> list[int]:
        """Items of each call."""
        return [len(call) for call in self.calls]


class ScriptedStreamEngine:
    """A stream engine: token k of a choice is id k with the text `<k>`; greedy, so every attempt says the same.

    Args:
        num_tokens: per choice.
        before_token: awaited before token k of an item, when given (raise to fail, sleep to be slow).
    """

    needs_root = False

    def __init__(
        self,
        num_tokens: int = 5,
        *,
        slots: int = 4,
        before_token: Callable[[StepItem, int], Awaitable[object]] | None = None,
    ) -> None:
        self.slots = slots
        self.started: list[StepItem] = []
        self._num_tokens = num_tokens
        self._before_token = before_token
        self._num_running = 0

    async def start(self) -> tuple[ModelCard, ...]:
        return (ModelCard(model="m", context_tokens=1024),)

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        self.started.append(item)
        self._num_running += 1
        try:
            progress = sink.resume_point()
            first = len(progress[0].token_ids) if progress else 0
            for number in range(first, self._num_tokens):
                if self._before_token is not None:
                    await self._before_token(item, number)
                await asyncio.sleep(0)
                if sink.is_cancelled:
                    raise CancelledWorkError("the sink said so")
                last = number == self._num_tokens - 1
                await sink.tokens(0, [number], f"<{number}>", finish_reason="stop" if last else None)
            return Usage(prompt_tokens=4, completion_tokens=self._num_tokens)
        finally:
            self._num_running -= 1

    def running(self) -> int:
        return self._num_running

    async def close(self) -> None:
        """Nothing to free."""
