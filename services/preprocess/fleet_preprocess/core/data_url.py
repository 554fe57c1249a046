"""`data:` URLs (RFC 2397), base64 only, strictly."""

from __future__ import annotations

import base64
import binascii

from fleet_common.errors import InvalidInputError
from fleet_preprocess.core.media_url import FileKind


def is_data_url(url: str) -> bool:
    """True for `data:...` in any case."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str, kind: FileKind, *, param: str) -> bytes:
    """Bytes of a base64 `data:` URL. Its media type and parameters are ignored: the content decides what it is.

    Raises:
        InvalidInputError: `invalid_image` (no base64, or bad base64), `image_too_large` (known from the length alone);
            for other kinds these with their names.
    """
    invalid = f"invalid_{kind.name}"
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidInputError("the data URL is not base64-encoded", param=param, code=invalid)
    if len(payload) * 3 // 4 - 2 > kind.max_bytes:
        raise kind.too_large(param)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError("the data URL holds invalid base64", param=param, code=invalid) from error
