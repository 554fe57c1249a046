"""What diffusion needs of a model: pictures that advance one denoising step at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fleet_diffusion.core.canvas import Canvas
from fleet_diffusion.core.limits import ModelFacts

#: Latents and what else a picture in work keeps on the device, by name.
Parts = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """One picture to be made.

    Attributes:
        guidance: scale of classifier-free guidance; at most 1 = none.
        seed: everything random about the picture follows from it.
        tenant: whose; conditioning is not shared between tenants.
        canvas: of an edit: what it begins from; only for models that take pictures.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_steps: int
    guidance: float
    seed: int
    tenant: str = ""
    canvas: Canvas | None = None


class PictureInWork(Protocol):
    """State of one picture between two steps. It belongs to the model that began it."""

    @property
    def num_steps(self) -> int:
        """Steps to the picture; schedulers of higher order take more than were asked for, edits fewer."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def was_cached(self) -> bool:
        """Whether the prompt's conditioning was known already."""


class PictureModel(Protocol):
    """A diffusion model. Methods block and are called from one thread only."""

    def load(self) -> ModelFacts:
        """Load weights. Raises OSError or ValueError when they are missing or not understood."""

    def begin(self, request: PictureRequest) -> PictureInWork:
        """Condition on the prompt, draw the noise; of an edit also turn the canvas into latents.

        Raises:
            InvalidInputError: the prompt is longer than the model takes.
        """

    def step(self, pictures: Sequence[PictureInWork]) -> None:
        """Take one step with each, in one pass: all of one size, each at a step of its own.

        Raises:
            EngineOutOfMemoryError: they do not fit together; none has taken its step.
        """

    def pixels(self, picture: PictureInWork) -> npt.NDArray[np.uint8]:
        """How it looks now: uint8 [height, width, 3]."""

    def take_out(self, picture: PictureInWork) -> Parts:
        """Move what it keeps on the device into arrays of this process; it cannot take a step until `put_back`."""

    def put_back(self, picture: PictureInWork, parts: Parts) -> None:
        """Undo `take_out`, bit by bit."""
