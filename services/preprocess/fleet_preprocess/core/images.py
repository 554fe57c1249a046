"""Image files to upright RGB arrays: caps from the header first, then every colour mode on white.

Formats: PNG, JPEG (MPO too), WebP, GIF (first frame), BMP and, where Pillow has it, AVIF. Animations give their first
frame. ICC profiles are not applied. Transparent pixels are composited on white.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from fleet_common.errors import InvalidInputError
from fleet_preprocess.core.limits import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")

#: uint8 [height, width, 3].
RgbArray = npt.NDArray[np.uint8]

#: What Pillow's parsers raise on hostile or damaged files; anything else is a bug and must surface.
_DECODE_ERRORS = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, limits: MediaLimits, *, param: str) -> RgbArray:
    """Decode one image file completely.

    Returns:
        uint8 [height, width, 3], upright, composited on white.
    Raises:
        InvalidInputError: `image_too_large` and `image_bad_aspect` from the header alone; `invalid_image` for what
            is no image, damaged or cut short.
    """
    return _decoded(data, limits, lambda image: np.asarray(_upright(_on_white(image), _orientation(image))), param)


def decode_mask(data: bytes, limits: MediaLimits, *, param: str) -> RgbArray:
    """Decode a mask: where it has transparent pixels these may change (OpenAI), else its light ones (diffusers).

    Returns:
        uint8 [height, width], upright, 255 = may change, 0 = stays.
    Raises:
        InvalidInputError: as `decode_image`.
    """
    return _decoded(data, limits, _changing, param)


def _decoded(
    data: bytes, limits: MediaLimits, convert: Callable[[Image.Image], npt.NDArray[np.uint8]], param: str
) -> RgbArray:
    if len(data) > limits.max_bytes:
        raise InvalidInputError(
            f"the image has {len(data)} bytes, the limit is {limits.max_bytes}", param=param, code="image_too_large"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, limits, param)
            image.load()
            return np.ascontiguousarray(convert(image), dtype=np.uint8)
    except _TOO_LARGE as error:
        raise InvalidInputError(
            f"the image has more than {limits.max_pixels} pixels", param=param, code="image_too_large"
        ) from error
    except UnidentifiedImageError as error:
        raise InvalidInputError("not an image of a supported format", param=param, code="invalid_image") from error
    except _DECODE_ERRORS as error:
        raise InvalidInputError("the image is damaged or cut short", param=param, code="invalid_image") from error


def _changing(image: Image.Image) -> npt.NDArray[np.uint8]:
    orientation = _orientation(image)
    alpha = np.asarray(_upright(image.convert("RGBA").getchannel("A"), orientation))
    if (alpha < 128).any():
        return np.where(alpha < 128, 255, 0).astype(np.uint8)
    light = np.asarray(_upright(_on_white(image).convert("L"), orientation))
    return np.where(light >= 128, 255, 0).astype(np.uint8)


def _check_size(size: tuple[int, int], limits: MediaLimits, param: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidInputError("the image has no pixels", param=param, code="invalid_image")
    if width * height > limits.max_pixels:
        raise InvalidInputError(
            f"the image is {width}x{height} pixels, the limit is {limits.max_pixels} pixels",
            param=param,
            code="image_too_large",
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise InvalidInputError(
            f"the image is {width}x{height} pixels; at most {limits.max_aspect_ratio:g} to 1 is allowed",
            param=param,
            code="image_bad_aspect",
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1-8; damaged metadata counts as upright, the picture itself is fine."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _DECODE_ERRORS:
        return 1
    return value if isinstance(value, int) else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    operation = _TRANSPOSE.get(orientation)
    return image if operation is None else image.transpose(operation)


def _on_white(image: Image.Image) -> Image.Image:
    """Any mode to RGB without clipping, inverting or dropping alpha."""
    if image.mode.startswith("I;16") or image.mode == "I":
        return _from_16_bit_grey(image)
    if image.mode not in ("RGBA", "LA", "La", "PA", "RGBa") and "transparency" not in image.info:
        return image.convert("RGB")
    _narrow_colour_key(image)
    rgba = image.convert("RGBA")
    ground = Image.new("RGB", rgba.size, "white")
    ground.paste(rgba, mask=rgba.getchannel("A"))
    return ground


def _from_16_bit_grey(image: Image.Image) -> Image.Image:
    """Scale 0-65535 to 0-255 (Pillow's own conversion clips at 255); a transparent grey value becomes white."""
    grey = np.asarray(image)
    wide = grey.astype(np.uint32)
    # In place: an image at the pixel limit has tens of millions of these.
    np.minimum(wide, 65535, out=wide)
    wide += 128
    wide //= 257
    scaled = wide.astype(np.uint8)
    key: Any = image.info.get("transparency")
    if isinstance(key, int):
        scaled[grey == key] = 255
    return Image.fromarray(scaled).convert("RGB")


def _narrow_colour_key(image: Image.Image) -> None:
    """A 16-bit PNG's transparent colour has 16-bit parts, while Pillow keeps the high bytes of its pixels."""
    key: Any = image.info.get("transparency")
    if isinstance(key, tuple) and any(part > 255 for part in key):
        image.info["transparency"] = tuple(part >> 8 for part in key)
