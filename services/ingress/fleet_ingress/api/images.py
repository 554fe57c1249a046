"""`POST /v1/images/generations` and `/edits`: the request, the answer, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

#: Most pictures shown on the way to each final one, as OpenAI has it.
MAX_PARTIAL_IMAGES = 3

Steps = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Guidance = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of an image generation.

    Attributes:
        model: a name from `/v1/models`.
        n: pictures.
        size: `<width>x<height>` in pixels, or `auto`.
        response_format: `b64_json`, or `url`: where the file lies for a while; not with `stream`.
        output_format: `png`, `jpeg` or `webp`.
        output_compression: quality of jpeg and webp, 0-100.
        stream: server-sent events: progress, partial pictures, each final one.
        partial_images: with `stream`: pictures to show on the way to each final one, at most.
        quality: `auto` or `standard`: the steps decide.
        background: `auto` or `opaque`.
        seed: extension; picture i is made from seed + i, 0 and up.
        steps, num_inference_steps: extension; denoising steps, under either name.
        guidance, guidance_scale: extension; scale of classifier-free guidance, under either name.
        negative_prompt: extension; what the picture must not show; needs guidance above 1.
        priority: extension; the priority class.
        moderation, user: without effect on the answer.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    size: str | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    user: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    steps: Steps | None = None
    num_inference_steps: Steps | None = None
    guidance: Guidance | None = None
    guidance_scale: Guidance | None = None
    negative_prompt: str | None = None
    priority: Literal["realtime", "batch", "background"] | None = None


class EditRequest(ImageRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the form of an image edit, besides its files.

    Attributes:
        strength: extension; above 0 to 1: how far the answer may be from the picture.
        input_fidelity: `low`: what `strength` says.
    """

    strength: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    input_fidelity: Literal["low"] | None = None


class EditForm(EditRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole form of an image edit.

    Attributes:
        image: one or more files, as `image` or `image[]`, in order.
        mask: a file of the first picture's size.
    """

    image: list[bytes]
    mask: bytes | None = None


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt as the text encoder saw it; pictures are no tokens here."""

    input_tokens: int
    output_tokens: int = 0
    total_tokens: int


class ImageDatum(msgspec.Struct, frozen=True, kw_only=True):
    """One picture as base64 of its file, or where that lies until `expires_at`; and the seed that makes it again."""

    b64_json: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    seed: int


class ImagesReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    created: int
    data: list[ImageDatum]
    size: str
    output_format: str
    background: str = "opaque"
    quality: str = "auto"
    usage: ImageUsage


class ImageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; `type` is its name too.

    Attributes:
        type: `image_generation.` or `image_edit.` and `progress`, `partial_image` or `completed`.
        index: which picture of the request, from 0.
        done_ratio: of the whole request, 0-1.
        usage: in the last event.
    """

    type: str
    created_at: int
    index: int | UnsetType = UNSET
    done_ratio: float | UnsetType = UNSET
    b64_json: str | UnsetType = UNSET
    partial_image_index: int | UnsetType = UNSET
    size: str | UnsetType = UNSET
    output_format: str | UnsetType = UNSET
    background: str | UnsetType = UNSET
    quality: str | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    usage: ImageUsage | UnsetType = UNSET
