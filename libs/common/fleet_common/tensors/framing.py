"""Bytes of a tensor in a network store.

u32 little-endian   length of the header
header              MessagePack map
zeros               up to a multiple of 64 bytes
body                the tensor, C-contiguous little-endian, possibly compressed
u64 little-endian   xxh3-64 of everything before
"""

from __future__ import annotations

import struct
import zlib
from enum import StrEnum

import msgpack
import numpy as np
import xxhash

from fleet_common.tensors.port import Array
from fleet_common.tensors.spec import TensorSpec, view_of

_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_ALIGN_BYTES = 64
_MAX_HEADER_BYTES = 4096
_VERSION = 1


class Compression(StrEnum):
    """How the body is packed."""

    NONE = "none"
    ZLIB = "zlib"


class FrameError(ValueError):
    """The bytes are cut short, corrupt, or another tensor."""


def max_frame_bytes(nbytes: int) -> int:
    """No frame of a tensor of `nbytes` is longer, whatever its compression (zlib may add 5 bytes to each 16 KB)."""
    return nbytes + nbytes // 2048 + _MAX_HEADER_BYTES + 2 * _ALIGN_BYTES


def pack(
    array: Array, spec: TensorSpec, compression: Compression, content_hash: str, expires_unix_s: float = 0.0
) -> bytearray:
    """Frame an array; it is copied once. After `expires_unix_s` the frame is no tensor any more; 0 = never."""
    if compression is Compression.ZLIB:
        body = zlib.compress(np.ascontiguousarray(array, dtype=spec.stored).tobytes(), level=1)
        body_bytes = len(body)
    else:
        body, body_bytes = b"", spec.nbytes
    fields: dict[str, object] = {
        "v": _VERSION,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "nbytes": spec.nbytes,
        "body_bytes": body_bytes,
        "compression": compression.value,
        "content_hash": content_hash,
    }
    if expires_unix_s:
        fields["expires_unix_s"] = expires_unix_s
    header: bytes = msgpack.packb(fields)
    start = _body_start(len(header))
    frame = bytearray(start + body_bytes + _CHECKSUM.size)
    _LENGTH.pack_into(frame, 0, len(header))
    frame[_LENGTH.size : _LENGTH.size + len(header)] = header
    if compression is Compression.ZLIB:
        frame[start : start + body_bytes] = body
    else:
        np.copyto(np.ndarray(spec.shape, spec.stored, buffer=frame, offset=start), array)
    _CHECKSUM.pack_into(frame, len(frame) - _CHECKSUM.size, _digest(frame))
    return frame


def unpack(frame: bytes | memoryview, spec: TensorSpec, now_unix_s: float = 0.0) -> Array:
    """The array a frame holds, read-only; a view of `frame` when it is not compressed.

    Raises:
        FrameError: anything but the intact tensor that `spec` describes, or it has expired.
    """
    if len(frame) < _LENGTH.size + _CHECKSUM.size:
        raise FrameError("cut short")
    (checksum,) = _CHECKSUM.unpack_from(frame, len(frame) - _CHECKSUM.size)
    if checksum != _digest(frame):
        raise FrameError("checksum differs")
    header, start = _header(frame)
    expected = (_VERSION, spec.dtype, list(spec.shape), spec.nbytes, len(frame) - start - _CHECKSUM.size)
    if tuple(header.get(name) for name in ("v", "dtype", "shape", "nbytes", "body_bytes")) != expected:
        raise FrameError("another tensor")
    expires_unix_s = header.get("expires_unix_s")
    if isinstance(expires_unix_s, float) and expires_unix_s <= now_unix_s:
        raise FrameError("expired")
    if header.get("compression") == Compression.ZLIB.value:
        return view_of(_inflate(memoryview(frame)[start : -_CHECKSUM.size], spec.nbytes), spec)
    if len(frame) - start - _CHECKSUM.size != spec.nbytes:
        raise FrameError("another tensor")
    return view_of(frame, spec, start)


def _header(frame: bytes | memoryview) -> tuple[dict[str, object], int]:
    (header_bytes,) = _LENGTH.unpack_from(frame)
    start = _body_start(header_bytes)
    if header_bytes > _MAX_HEADER_BYTES or start + _CHECKSUM.size > len(frame):
        raise FrameError("header is cut short")
    try:
        header = msgpack.unpackb(frame[_LENGTH.size : _LENGTH.size + header_bytes])
    except (ValueError, msgpack.UnpackException) as err:
        raise FrameError("header cannot be read") from err
    if not isinstance(header, dict):
        raise FrameError("header is no map")
    return header, start


def _inflate(body: memoryview, nbytes: int) -> bytes:
    """Decompress, never into more than the tensor should have."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(body, nbytes + 1)
    except zlib.error as err:
        raise FrameError("body cannot be decompressed") from err
    if len(raw) != nbytes:
        raise FrameError("body decompresses to another size")
    return raw


def _body_start(header_bytes: int) -> int:
    return -(-(_LENGTH.size + header_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES


def _digest(frame: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(frame)[: len(frame) - _CHECKSUM.size])
