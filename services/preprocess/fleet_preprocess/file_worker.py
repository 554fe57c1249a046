"""What engines have in common that make arrays of files, without any model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fleet_common.errors import ContractError, EngineOutOfMemoryError, FleetError
from fleet_common.stage.port import Product, StepItem
from fleet_contracts.control import ModelCard
from fleet_contracts.preprocess import PreprocessParams


class FileEngine:
    """Prepares roots side by side; the failure of one is its own. Implements `BatchEngine`, but for `prepare`.

    Attributes:
        route: the one it takes.
    """

    needs_root = True
    route: str

    def __init__(self, card: ModelCard, *, num_threads: int, max_batch: int) -> None:
        self.max_batch = max_batch
        self._card = card
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="preprocess")

    def prepare(self, root: bytes, params: PreprocessParams) -> Product:
        """The arrays of one root; called in a thread. Raises FleetError."""
        raise NotImplementedError

    async def start(self) -> tuple[ModelCard, ...]:
        return (self._card,)

    async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._threads, self._prepared, item) for item in items))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, item: StepItem) -> Product | FleetError:
        params = item.task.step.params
        if not isinstance(params, PreprocessParams) or params.route != self.route:
            return ContractError(f"this worker takes the route {self.route} only")
        try:
            return self.prepare(item.root, params)
        except FleetError as error:
            return error
        except MemoryError:
            return EngineOutOfMemoryError("no memory for this request's files")
