"""Pixels to picture files. Pure."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


def encode_picture(pixels: npt.NDArray[np.uint8], file_format: str, quality: int) -> bytes:
    """A picture file.

    Args:
        pixels: uint8 [height, width, 3].
        file_format: a key of MEDIA_TYPES.
        quality: 0-100, of formats that lose something.
    """
    out = io.BytesIO()
    image = Image.fromarray(pixels, "RGB")
    if file_format == "png":
        image.save(out, "PNG")
    else:
        image.save(out, file_format.upper(), quality=quality)
    return out.getvalue()
