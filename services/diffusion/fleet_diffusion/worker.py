"""Diffusion as the stage runner sees it: a step in, every picture shown to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from fleet_common.clock import SystemClock
from fleet_common.errors import ContractError, EngineDeadError, FleetError, InvalidInputError
from fleet_common.stage.port import StepItem, TokenSink
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import Modality, PriorityClass
from fleet_contracts.control import ModelCard, PictureLimits
from fleet_contracts.diffusion import DiffusionParams, EditParams
from fleet_contracts.events import Usage
from fleet_diffusion.core.canvas import Canvas, Pixels, lay_out, num_steps_from
from fleet_diffusion.core.files import MEDIA_TYPES, encode_picture
from fleet_diffusion.core.limits import Caps, check_params, max_images, picture_limits
from fleet_diffusion.core.partials import partial_steps
from fleet_diffusion.core.steps import Job, StepPolicy, StepScheduler
from fleet_diffusion.engine.port import PictureModel, PictureRequest
from fleet_diffusion.stepper import Order, Shown, Stepper

#: Shortest time between two reports of progress.
_PROGRESS_S = 0.25

_RANKS = {PriorityClass.REALTIME: 0, PriorityClass.BATCH: 1, PriorityClass.BACKGROUND: 2}


class DiffusionEngine:
    """`StreamEngine` over a picture model.

    Args:
        model: makes the pictures.
        name: under which clients ask for the model.
        caps: what a request may ask for.
        policy: places and batches.
        lanes: requests taken in at once: above `policy.slots`, so that an urgent one finds its way to the front.
    """

    needs_root = False

    def __init__(
        self,
        model: PictureModel,
        metrics: WorkerMetrics,
        *,
        name: str,
        caps: Caps,
        policy: StepPolicy,
        lanes: int,
    ) -> None:
        self.slots = lanes
        self._model = model
        self._name = name
        self._caps = caps
        self._stepper = Stepper(model, StepScheduler(policy), metrics, SystemClock(), name=name)
        self._limits: PictureLimits | None = None
        self._max_images = 0

    async def start(self) -> tuple[ModelCard, ...]:
        try:
            facts = await self._stepper.in_thread(self._model.load)
        except (OSError, ValueError, TypeError, KeyError, ImportError, AttributeError, RuntimeError) as error:
            raise EngineDeadError(f"the model could not be loaded: {error}") from error
        self._stepper.start()
        self._limits = picture_limits(facts, self._caps)
        self._max_images = max_images(facts, self._caps)
        return (
            ModelCard(
                model=self._name,
                input_modalities=(Modality.TEXT, Modality.IMAGE) if self._max_images else (Modality.TEXT,),
                output_modalities=(Modality.IMAGE,),
                revision=facts.revision,
                pictures=self._limits,
                max_images=self._max_images,
            ),
        )

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        if self._limits is None:
            raise EngineDeadError("the engine was not started")
        params = _params(item)
        check_params(params, self._limits, self._max_images)
        canvas = await asyncio.to_thread(_canvas, item, params) if isinstance(params, EditParams) else None
        orders = [_order(item, params, choice, sink, canvas) for choice in range(params.n)]
        try:
            async with asyncio.TaskGroup() as group:
                for order in orders:
                    self._stepper.submit(order)
                report = group.create_task(_report(orders, sink))
                deliveries = [
                    group.create_task(_deliver(order, choice, params, sink)) for choice, order in enumerate(orders)
                ]
                for delivery in deliveries:
                    await delivery
                report.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            for order in orders:
                self._stepper.withdraw(order)
        return Usage(prompt_tokens=orders[0].num_prompt_tokens, completion_tokens=0)

    def running(self) -> int:
        return self._stepper.num_running

    def is_alive(self) -> bool:
        """False once nothing can step any more: this worker has to be replaced."""
        return self._stepper.is_alive

    def is_responsive(self) -> bool:
        """A step may take as long as the model needs: only a dead stepper does not answer."""
        return self._stepper.is_alive

    def kv_cache_usage_ratio(self) -> float:
        return 0.0

    async def close(self) -> None:
        await self._stepper.close()


async def _deliver(order: Order, choice: int, params: DiffusionParams, sink: TokenSink) -> None:
    index = 0
    while True:
        shown = await order.shown.get()
        if not isinstance(shown, Shown):
            raise shown
        data = await asyncio.to_thread(partial(encode_picture, shown.pixels, params.format, params.quality))
        await sink.picture(
            data,
            choice=choice,
            index=index,
            media_type=MEDIA_TYPES[params.format],
            size=(params.width, params.height),
            is_final=shown.is_final,
        )
        index += 1
        if shown.is_final:
            return


async def _report(orders: Sequence[Order], sink: TokenSink) -> None:
    """Tell how far the request is, now and then; what a restart takes back is not told."""
    told_ratio = 0.0
    while True:
        await asyncio.sleep(_PROGRESS_S)
        done_ratio = sum(order.done_ratio for order in orders) / len(orders)
        if done_ratio > told_ratio:
            told_ratio = done_ratio
            await sink.progress(done_ratio)


def _params(item: StepItem) -> DiffusionParams:
    params = item.task.step.params
    if not isinstance(params, DiffusionParams):
        raise InvalidInputError(f"diffusion was given {type(params).__name__}")
    return params


def _canvas(item: StepItem, params: EditParams) -> Canvas:
    """What the edit begins from; a copy, as the step may outlive its inputs. Raises ContractError."""
    found: dict[str, Pixels] = {name: np.array(tensor) for (_, name), tensor in item.tensors.items()}
    names = [f"image{number}" for number in range(params.num_images)]
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(names, (params.height, params.width, 3))
    if params.has_mask:
        wanted["mask"] = (params.height, params.width)
    for name, shape in wanted.items():
        if name not in found or found[name].shape != shape or found[name].dtype != np.uint8:
            raise ContractError(f"an edit needs {name} as uint8 {list(shape)}")
    mask = found["mask"].astype(np.bool_) if params.has_mask else None
    return lay_out([found[name] for name in names], mask, params.strength)


def _order(item: StepItem, params: DiffusionParams, choice: int, sink: TokenSink, canvas: Canvas | None) -> Order:
    task, attempt = item.task, item.attempt
    num_steps = params.num_steps if canvas is None else num_steps_from(params.num_steps, canvas.strength)
    job = Job(
        key=f"{attempt.request_id}.{attempt.step_id}.{attempt.epoch}.{attempt.delivery}.{choice}",
        shape=(params.width, params.height),
        rank=_RANKS[task.priority_class],
        deadline_unix_s=task.deadline_unix_s,
        enqueued_unix_s=task.enqueued_unix_s,
        num_steps=num_steps,
    )
    request = PictureRequest(
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        num_steps=params.num_steps,
        guidance=params.guidance,
        seed=params.seed + choice,
        tenant=task.tenant,
        canvas=canvas,
    )
    return Order(job, request, sink, partial_after=partial_steps(num_steps, params.num_partial))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that says most: a dead engine before the rest."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    for kind in (EngineDeadError, FleetError):
        for error in flat:
            if isinstance(error, kind):
                return error
    return flat[0]
