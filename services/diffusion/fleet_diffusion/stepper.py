"""Runs pictures side by side, one denoising step at a time, as the step scheduler says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from fleet_common.clock import Clock
from fleet_common.errors import (
    CancelledWorkError,
    EngineDeadError,
    EngineError,
    FleetError,
    StoreError,
    TensorNotFoundError,
)
from fleet_common.stage.port import TokenSink
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.tensors.port import Array
from fleet_contracts.tensors import TensorRef
from fleet_diffusion.core.canvas import with_kept
from fleet_diffusion.core.steps import Job, StepScheduler
from fleet_diffusion.engine.port import PictureInWork, PictureModel, PictureRequest

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture to show: uint8 [height, width, 3]."""

    pixels: npt.NDArray[np.uint8]
    is_final: bool


@dataclass(slots=True, eq=False)
class Order:
    """A picture somebody waits for.

    Attributes:
        job: what the scheduler knows of it.
        partial_after: counts of finished steps after which it is shown on its way.
        shown: pictures in order, or the error that ends them.
        picture: its state once it has begun; `parked` holds what was on the device while it has no slot: references,
            or the arrays themselves when the store had no room.
        is_withdrawn: nobody waits any more.
    """

    job: Job
    request: PictureRequest
    sink: TokenSink
    partial_after: tuple[int, ...] = ()
    shown: asyncio.Queue[Shown | FleetError] = field(default_factory=asyncio.Queue)
    picture: PictureInWork | None = None
    parked: dict[str, TensorRef | Array] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_done: int = 0
    is_withdrawn: bool = False

    @property
    def done_ratio(self) -> float:
        """Share of the steps done, 0-1."""
        num_steps = self.picture.num_steps if self.picture is not None else self.job.num_steps
        return min(1.0, self.num_done / num_steps)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it."""
        return self.is_withdrawn or self.sink.is_cancelled


class Stepper:
    """One model, one thread of model work; decisions are the scheduler's, between two steps."""

    def __init__(
        self, model: PictureModel, scheduler: StepScheduler, metrics: WorkerMetrics, clock: Clock, *, name: str
    ) -> None:
        """
        Args:
            name: of the model, in metrics.
        """
        self._model = model
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._name = name
        self._orders: dict[str, Order] = {}
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusion")
        self._task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """False once it can step no more."""
        return self._task is not None and not self._task.done()

    @property
    def num_running(self) -> int:
        """Pictures in work."""
        return self._scheduler.num_running()

    def start(self) -> None:
        """Begin to step; the model is loaded."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop after the current step."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run model work, one piece at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def submit(self, order: Order) -> None:
        """Make a picture. Raises EngineDeadError."""
        if not self.is_alive:
            raise EngineDeadError("the stepper has stopped")
        self._orders[order.job.key] = order
        self._scheduler.add(order.job)
        self._wake.set()

    def withdraw(self, order: Order) -> None:
        """Nobody waits for it any more; it leaves before the next step."""
        order.is_withdrawn = True
        self._wake.set()

    async def _model_work(self, work: Callable[[], T]) -> T:
        """Model work, at its edge: whatever it raises comes out as a FleetError."""
        try:
            return await self.in_thread(work)
        except FleetError:
            raise
        except Exception as error:
            log.exception("model_raised")
            raise EngineError("the model raised") from error

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                if not await self._tick():
                    await self._wake.wait()
        except asyncio.CancelledError:
            self._fail_all("the worker stops")
            raise
        except Exception:
            log.exception("stepper_died")
            self._fail_all("the stepper died")

    async def _tick(self) -> bool:
        """One decision and what follows from it; False when there is nothing to do."""
        await self._drop_over()
        tick = self._scheduler.tick(self._clock.unix_s())
        for key in tick.park:
            await self._park(self._orders[key])
        for key in tick.admit:
            await self._admit(self._orders[key])
        # Who could not begin has left meanwhile.
        orders = [self._orders[key] for key in tick.step if key in self._orders]
        if orders:
            await self._step(orders)
        return bool(tick.step)

    async def _drop_over(self) -> None:
        for order in list(self._orders.values()):
            if order.is_over:
                await self._leave(order, CancelledWorkError("nobody waits for this picture"))

    async def _step(self, orders: Sequence[Order]) -> None:
        began_s = self._clock.monotonic_s()
        moved = await self._advance(orders)
        took_s = self._clock.monotonic_s() - began_s
        for order in moved:
            order.num_done += 1
        finished = set(self._scheduler.advanced([order.job.key for order in moved], took_s))
        for order in moved:
            if order.job.key in finished:
                await self._show(order, is_final=True)
            elif order.num_done in order.partial_after:
                await self._show(order, is_final=False)

    async def _advance(self, orders: Sequence[Order]) -> list[Order]:
        """Step these; halves of them when they fail together, until those at fault have failed alone."""
        pictures = [order.picture for order in orders if order.picture is not None]
        try:
            await self._model_work(lambda: self._model.step(pictures))
        except FleetError as error:
            if len(orders) > 1:
                middle = len(orders) // 2
                return [*await self._advance(orders[:middle]), *await self._advance(orders[middle:])]
            await self._leave(orders[0], error)
            return []
        self._metrics.diffusion_batch_pictures.labels(model=self._name).observe(len(orders))
        return list(orders)

    async def _admit(self, order: Order) -> None:
        try:
            if order.parked:
                await self._bring_back(order)
            if order.picture is None:
                await self._begin(order)
        except FleetError as error:
            await self._leave(order, error)

    async def _begin(self, order: Order) -> None:
        picture = await self._model_work(lambda: self._model.begin(order.request))
        order.picture = picture
        order.num_done = 0
        order.num_prompt_tokens = picture.num_prompt_tokens
        outcome = "hit" if picture.was_cached else "miss"
        self._metrics.feature_cache_total.labels(stage="diffusion_generate", outcome=outcome).inc()
        self._scheduler.begun(order.job.key, picture.num_steps)

    async def _park(self, order: Order) -> None:
        picture = order.picture
        if picture is None:
            return
        parts = await self._model_work(lambda: self._model.take_out(picture))
        for name, array in parts.items():
            try:
                order.parked[name] = await order.sink.keep(array)
            except StoreError as error:
                log.info("latents_kept_here", code=error.code)
                order.parked[name] = array
        self._metrics.diffusion_parked_total.labels(model=self._name).inc()

    async def _bring_back(self, order: Order) -> None:
        """Latents back to where they were; what the store has lost is made again, from the seed."""
        parked, order.parked = order.parked, {}
        picture = order.picture
        assert picture is not None
        try:
            parts = {
                name: await order.sink.fetch(part) if isinstance(part, TensorRef) else part
                for name, part in parked.items()
            }
        except (TensorNotFoundError, StoreError) as error:
            log.info("latents_lost", code=error.code)
            order.picture = None
        else:
            await self._model_work(lambda: self._model.put_back(picture, parts))
        await self._forget(order, parked)

    async def _forget(self, order: Order, parked: dict[str, TensorRef | Array]) -> None:
        for part in parked.values():
            if isinstance(part, TensorRef):
                with contextlib.suppress(StoreError):  # the TTL is the net
                    await order.sink.forget(part)

    async def _show(self, order: Order, *, is_final: bool) -> None:
        picture = order.picture
        assert picture is not None
        try:
            pixels = await self._model_work(lambda: self._model.pixels(picture))
        except FleetError as error:
            await self._leave(order, error)
            return
        order.shown.put_nowait(Shown(with_kept(pixels, order.request.canvas), is_final))
        if is_final:
            self._drop(order)

    async def _leave(self, order: Order, error: FleetError) -> None:
        self._drop(order)
        order.shown.put_nowait(error)
        await self._forget(order, order.parked)

    def _drop(self, order: Order) -> None:
        self._scheduler.remove(order.job.key)
        self._orders.pop(order.job.key, None)
        # Latents leave the device now, whoever still holds the order.
        order.picture = None

    def _fail_all(self, reason: str) -> None:
        for order in list(self._orders.values()):
            self._drop(order)
            order.shown.put_nowait(EngineDeadError(reason))
