"""For tests and benchmarks of diffusion: steps as the runner hands them over, a sink that keeps everything."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image

from fleet_common.errors import CancelledWorkError, StoreFullError, TensorNotFoundError
from fleet_common.stage.port import StepItem
from fleet_common.tensors.port import Array
from fleet_common.testing.steps import first_attempt
from fleet_contracts.base import PriorityClass, Stage, StepId
from fleet_contracts.decode import TokenLogprob
from fleet_contracts.diffusion import DiffusionParams
from fleet_contracts.events import ChoiceProgress
from fleet_contracts.tensors import MemoryPlace, TensorRef
from fleet_contracts.work import PlanStep


@dataclass(frozen=True, slots=True)
class KeptPicture:
    """One call of `picture`."""

    data: bytes
    choice: int
    index: int
    media_type: str
    is_final: bool

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """Decoded: uint8 [height, width, 3]."""
        return np.array(Image.open(io.BytesIO(self.data)).convert("RGB"))


@dataclass
class RecordingSink:
    """A TokenSink that keeps pictures and parked arrays.

    Attributes:
        cancelled: nobody waits from now on.
        loses_parked: what is parked is gone when it is wanted; `is_full`: nothing can be parked.
    """

    cancelled: bool = False
    loses_parked: bool = False
    is_full: bool = False
    pictures: list[KeptPicture] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    parked: dict[str, Array] = field(default_factory=dict)
    num_parked: int = 0

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
        raise AssertionError("pictures have no tokens")

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled

    def resume_point(self) -> Sequence[ChoiceProgress]:
        return ()

    async def picture(
        self, data: bytes, *, choice: int, index: int, media_type: str, size: tuple[int, int], is_final: bool
    ) -> None:
        if self.cancelled:
            raise CancelledWorkError("nobody waits")
        self.pictures.append(KeptPicture(data, choice, index, media_type, is_final))

    async def progress(self, done_ratio: float) -> None:
        self.ratios.append(done_ratio)

    async def keep(self, array: Array) -> TensorRef:
        if self.is_full:
            raise StoreFullError("no room")
        key = str(self.num_parked)
        self.num_parked += 1
        self.parked[key] = np.array(array)
        return TensorRef(
            place=MemoryPlace(key=key), dtype=str(array.dtype), shape=array.shape, nbytes=int(array.nbytes)
        )

    async def fetch(self, ref: TensorRef) -> Array:
        assert isinstance(ref.place, MemoryPlace)
        if self.loses_parked:
            raise TensorNotFoundError(ref, "lost")
        return self.parked[ref.place.key]

    async def forget(self, ref: TensorRef) -> None:
        assert isinstance(ref.place, MemoryPlace)
        self.parked.pop(ref.place.key, None)

    def final(self, choice: int = 0) -> npt.NDArray[np.uint8]:
        """Pixels of the final picture of a choice."""
        (kept,) = [kept for kept in self.pictures if kept.choice == choice and kept.is_final]
        return kept.pixels


def picture_item(
    name: str,
    params: DiffusionParams,
    *,
    priority_class: PriorityClass = PriorityClass.REALTIME,
    deadline_unix_s: float = 4e9,
    enqueued_unix_s: float = 4e9,
) -> StepItem:
    """A step that makes pictures; `name` is the request's."""
    step = PlanStep(step_id=StepId("gen"), stage=Stage.DIFFUSION_GENERATE, model="painter", params=params)
    return first_attempt(
        step,
        request_id=f"i_{name}",
        worker_id="diffusion-0",
        priority_class=priority_class,
        deadline_unix_s=deadline_unix_s,
        enqueued_unix_s=enqueued_unix_s,
    )
