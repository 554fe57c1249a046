"""Stage `diffusion_generate`: a prompt, or pictures and a prompt, in; pictures out (as events)."""

from __future__ import annotations

from fleet_contracts.base import Contract


class DiffusionParams(Contract, frozen=True, kw_only=True, tag="diffusion_generate.v1"):
    """Parameters of an image generation; sizes in pixels.

    Attributes:
        guidance: scale of classifier-free guidance; at most 1 = none.
        seed: picture number i of the request has seed + i, so a repeated attempt makes the same pictures.
        prompt, negative_prompt: what the picture shows, and what it does not.
        num_partial: pictures to show on the way to each final one, at most.
        format: file format of the pictures: `png`, `jpeg` or `webp`.
        quality: 0-100, of the formats that lose something.
    """

    width: int
    height: int
    num_steps: int = 20
    guidance: float = 3.0
    seed: int = 0
    n: int = 1
    prompt: str = ""
    negative_prompt: str = ""
    num_partial: int = 0
    format: str = "png"
    quality: int = 95


class EditParams(DiffusionParams, frozen=True, kw_only=True, tag="diffusion_edit.v1"):
    """Parameters of an edit. The step needs a `preprocess` step of the route `edit` and reads all its tensors.

    Attributes:
        strength: above 0 to 1; share of the steps that are taken, from the picture with as much noise. 1: nothing
            of it is left but what a mask keeps.
        num_images: pictures to begin from, in the client's order.
        has_mask: whether only part of the first one may change.
    """

    strength: float
    num_images: int = 1
    has_mask: bool = False
