"""From the body of an image request to what the fleet is asked for; and the checks types cannot make."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

import msgspec

from fleet_common.errors import InvalidInputError, UnsupportedModalityError
from fleet_contracts.base import Modality, PriorityClass
from fleet_contracts.control import ModelCard, PictureLimits
from fleet_contracts.decode import DecodeParams
from fleet_contracts.diffusion import DiffusionParams, EditParams
from fleet_contracts.preprocess import EditFiles, PreprocessParams
from fleet_ingress.api.decode import decode_fields
from fleet_ingress.api.form import Form
from fleet_ingress.api.images import EditRequest, ImageRequest
from fleet_ingress.core.parsed import ParsedRequest

T = TypeVar("T")

_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_DEFAULT_QUALITY = 95
_DEFAULT_STRENGTH = 0.6
#: With a mask the rest of the picture says what has to fit.
_MASKED_STRENGTH = 1.0
_IMAGE_NAMES = ("image", "image[]")
_MASK = "mask"


def parse_images(request: ImageRequest, card: ModelCard, seed: int) -> ParsedRequest:
    """What is asked for, all of it within what the model's card says.

    Args:
        seed: of a request that names none.
    Raises:
        UnsupportedModalityError: the model makes no pictures.
        InvalidInputError: `param` names the field at fault.
    """
    limits = card.pictures
    if limits is None or Modality.IMAGE not in card.output_modalities:
        raise UnsupportedModalityError("This model makes no pictures.", param="model")
    if request.response_format == "url" and request.stream:
        raise InvalidInputError("A stream brings its pictures as `b64_json`.", param="response_format")
    width, height = _size(request.size, limits)
    return ParsedRequest(
        route="image_generation",
        model=request.model,
        preprocess=PreprocessParams(),
        decode=DecodeParams(),
        priority_class=PriorityClass(request.priority or PriorityClass.REALTIME),
        is_stream=bool(request.stream),
        response_format=request.response_format or "b64_json",
        pictures=DiffusionParams(
            width=width,
            height=height,
            num_steps=_num_steps(request, limits),
            guidance=_guidance(request, limits),
            seed=seed if request.seed is None else request.seed,
            n=_num_pictures(request, limits),
            prompt=_text(request.prompt, "prompt", limits),
            negative_prompt=_text(request.negative_prompt or "", "negative_prompt", limits),
            num_partial=_num_partial(request),
            format=request.output_format or "png",
            quality=_quality(request),
        ),
    )


def read_edit(form: Form) -> tuple[EditRequest, EditFiles]:
    """The fields and files of a form. Raises InvalidInputError."""
    fields: dict[str, str] = {}
    for name, value in form.fields:
        if name in (*_IMAGE_NAMES, _MASK):
            param = _MASK if name == _MASK else "image"
            raise InvalidInputError(f"`{param}` must be a file, with a name.", param=param)
        if name in fields:
            raise InvalidInputError(f"`{name}` was sent more than once.", param=name)
        if value:
            fields[name] = value
    for name, _ in form.files:
        if name not in (*_IMAGE_NAMES, _MASK):
            raise InvalidInputError(f"`{name}` is no file.", param=name, code="unknown_parameter")
    images = [file.data for name, file in form.files if name in _IMAGE_NAMES]
    masks = [file.data for name, file in form.files if name == _MASK]
    if not images:
        raise InvalidInputError("`image` is required.", param="image", code="missing_required_parameter")
    if len(masks) > 1:
        raise InvalidInputError("`mask` was sent more than once.", param=_MASK)
    for param, files in (("image", images), (_MASK, masks)):
        if not all(files):
            raise InvalidInputError("The file is empty.", param=param, code="invalid_image")
    return decode_fields(fields, EditRequest), EditFiles(images=tuple(images), mask=b"".join(masks))


def parse_edit(request: EditRequest, files: EditFiles, card: ModelCard, seed: int) -> ParsedRequest:
    """What is asked for, all of it within what the model's card says.

    Raises:
        UnsupportedModalityError: the model makes, or takes, no pictures.
        InvalidInputError: `param` names the field at fault.
    """
    parsed = parse_images(request, card, seed)
    if Modality.IMAGE not in card.input_modalities or not card.max_images:
        raise UnsupportedModalityError("This model edits no pictures.", param="model")
    if len(files.images) > card.max_images:
        raise InvalidInputError(
            f"The model edits {card.max_images} pictures at most, {len(files.images)} were sent.",
            param="image",
            code="too_many_images",
        )
    drawn = parsed.pictures
    assert drawn is not None
    strength = _MASKED_STRENGTH if files.mask else _DEFAULT_STRENGTH
    edit = EditParams(
        **msgspec.structs.asdict(drawn),
        strength=strength if request.strength is None else request.strength,
        num_images=len(files.images),
        has_mask=bool(files.mask),
    )
    preprocess = PreprocessParams(route="edit", width=drawn.width, height=drawn.height)
    return replace(parsed, route="image_edit", preprocess=preprocess, pictures=edit)


def _size(size: str | None, limits: PictureLimits) -> tuple[int, int]:
    """Width and height in pixels."""
    if size is None or size == "auto":
        return limits.default_width, limits.default_height
    match = _SIZE.fullmatch(size)
    if match is None:
        raise InvalidInputError('`size` is "auto" or "<width>x<height>", like "512x512".', param="size")
    width, height = int(match[1]), int(match[2])
    if max(width, height) > limits.max_side or width * height > limits.max_pixels:
        raise InvalidInputError(
            f"A picture may have sides of {limits.max_side} and {limits.max_pixels} pixels in all.",
            param="size",
            code="size_too_large",
        )
    if width % limits.size_step or height % limits.size_step:
        raise InvalidInputError(f"Width and height must be multiples of {limits.size_step}.", param="size")
    return width, height


def _num_pictures(request: ImageRequest, limits: PictureLimits) -> int:
    count = request.n or 1
    if count > limits.max_pictures:
        raise InvalidInputError(f"`n` may be at most {limits.max_pictures}.", param="n")
    return count


def _num_steps(request: ImageRequest, limits: PictureLimits) -> int:
    steps = _one_of("steps", request.steps, "num_inference_steps", request.num_inference_steps)
    if steps is None:
        return limits.default_steps
    if steps > limits.max_steps:
        param = "steps" if request.steps is not None else "num_inference_steps"
        raise InvalidInputError(f"At most {limits.max_steps} steps.", param=param)
    return steps


def _guidance(request: ImageRequest, limits: PictureLimits) -> float:
    guidance = _one_of("guidance", request.guidance, "guidance_scale", request.guidance_scale)
    guidance = limits.default_guidance if guidance is None else guidance
    if request.negative_prompt and guidance <= 1.0:
        raise InvalidInputError("`negative_prompt` has no effect unless guidance is above 1.", param="negative_prompt")
    return guidance


def _num_partial(request: ImageRequest) -> int:
    if request.partial_images and not request.stream:
        raise InvalidInputError("`partial_images` needs `stream` to be true.", param="partial_images")
    return request.partial_images or 0


def _quality(request: ImageRequest) -> int:
    if request.output_compression is None:
        return _DEFAULT_QUALITY
    if request.output_format in (None, "png") and request.output_compression != 100:
        raise InvalidInputError(
            "`output_compression` is for jpeg and webp; png loses nothing.", param="output_compression"
        )
    return request.output_compression


def _text(text: str, param: str, limits: PictureLimits) -> str:
    if len(text) > limits.max_prompt_chars:
        raise InvalidInputError(
            f"`{param}` may have {limits.max_prompt_chars} characters, this one has {len(text)}.",
            param=param,
            code="string_above_max_length",
        )
    return text


def _one_of(name: str, value: T | None, other_name: str, other: T | None) -> T | None:
    """A field that has two names."""
    if value is not None and other is not None and value != other:
        raise InvalidInputError(f"`{name}` and `{other_name}` say different things; send one.", param=other_name)
    return value if value is not None else other
