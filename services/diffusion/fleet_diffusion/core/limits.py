"""What a request may ask for: from the model's facts and the operator's caps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_common.errors import InvalidInputError
from fleet_contracts.control import PictureLimits
from fleet_contracts.diffusion import DiffusionParams, EditParams
from fleet_diffusion.core.files import MEDIA_TYPES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a loaded model; sizes in pixels.

    Attributes:
        revision: identifies the weights.
        size_step: width and height must be multiples of it.
        default_steps, default_guidance: what the model's makers use.
        takes_images: whether pictures can be edited.
    """

    revision: str
    default_width: int
    default_height: int
    size_step: int
    default_steps: int
    default_guidance: float
    takes_images: bool = False


@dataclass(frozen=True, slots=True)
class Caps:
    """The operator's word; see `DiffusionSettings`."""

    max_side: int
    max_pixels: int
    max_steps: int
    max_pictures: int
    max_prompt_chars: int
    default_steps: int = 0
    default_guidance: float | None = None
    max_images: int = 4


def picture_limits(facts: ModelFacts, caps: Caps) -> PictureLimits:
    """What the model's card says. ValueError when the caps leave out the model's own size."""
    if max(facts.default_width, facts.default_height) > caps.max_side or (
        facts.default_width * facts.default_height > caps.max_pixels
    ):
        raise ValueError(f"the model's own size {facts.default_width}x{facts.default_height} is over the caps")
    return PictureLimits(
        default_width=facts.default_width,
        default_height=facts.default_height,
        size_step=facts.size_step,
        max_side=caps.max_side,
        max_pixels=caps.max_pixels,
        default_steps=min(caps.default_steps or facts.default_steps, caps.max_steps),
        max_steps=caps.max_steps,
        default_guidance=facts.default_guidance if caps.default_guidance is None else caps.default_guidance,
        max_pictures=caps.max_pictures,
        max_prompt_chars=caps.max_prompt_chars,
    )


def max_images(facts: ModelFacts, caps: Caps) -> int:
    """Pictures that an edit may begin from; 0: none."""
    return caps.max_images if facts.takes_images else 0


def check_params(params: DiffusionParams, limits: PictureLimits, num_images: int = 0) -> None:
    """Whoever asked: nothing over the limits reaches the model. Raises InvalidInputError.

    Args:
        num_images: that an edit may begin from.
    """
    if isinstance(params, EditParams):
        if not 1 <= params.num_images <= num_images:
            raise InvalidInputError(f"The model edits {num_images} pictures at most.", param="image")
        if not 0.0 < params.strength <= 1.0:
            raise InvalidInputError("The strength is above 0 and at most 1.", param="strength")
    sides = (params.width, params.height)
    is_on_grid = all(side > 0 and side % limits.size_step == 0 for side in sides)
    if not is_on_grid or max(sides) > limits.max_side or params.width * params.height > limits.max_pixels:
        raise InvalidInputError(f"The model does not make pictures of {params.width}x{params.height}.", param="size")
    if not 1 <= params.num_steps <= limits.max_steps:
        raise InvalidInputError(f"The model takes 1 to {limits.max_steps} steps.", param="steps")
    if not 1 <= params.n <= limits.max_pictures:
        raise InvalidInputError(f"The model makes 1 to {limits.max_pictures} pictures per request.", param="n")
    if params.format not in MEDIA_TYPES:
        raise InvalidInputError("There is no such picture format here.", param="output_format")
