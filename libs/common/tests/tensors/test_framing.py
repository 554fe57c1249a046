"""Frames of the network store: what goes in comes out, and nothing else does."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_common.tensors.framing import Compression, FrameError, max_frame_bytes, pack, unpack
from fleet_common.tensors.spec import spec_of_array
from fleet_common.testing.tensor_conformance import numbers


@pytest.mark.parametrize("compression", list(Compression))
def test_frame_gives_the_array_back(compression: Compression) -> None:
    array = numbers(33, 7)
    spec = spec_of_array(array, None)

    frame = bytes(pack(array, spec, compression, "hash"))

    np.testing.assert_array_equal(unpack(frame, spec), array)


def test_layout_can_be_read_by_anybody_with_messagepack() -> None:
    array = numbers(5, 3, dtype="uint16")
    spec = spec_of_array(array, "bfloat16")

    frame = bytes(pack(array, spec, Compression.NONE, "h"))

    (length,) = struct.unpack_from("<I", frame)
    header = msgpack.unpackb(frame[4 : 4 + length])
    start = -(-(4 + length) // 64) * 64
    assert header == {
        "v": 1,
        "dtype": "bfloat16",
        "shape": [5, 3],
        "nbytes": 30,
        "body_bytes": 30,
        "compression": "none",
        "content_hash": "h",
    }
    assert frame[start : start + 30] == array.tobytes()
    assert len(frame) == start + 30 + 8


@pytest.mark.parametrize("compression", list(Compression))
def test_every_cut_is_refused(compression: Compression) -> None:
    array = numbers(20)
    spec = spec_of_array(array, None)
    frame = bytes(pack(array, spec, compression, ""))

    for length in range(len(frame)):
        with pytest.raises(FrameError):
            unpack(frame[:length], spec)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_every_flipped_byte_is_refused(position: int, flip: int) -> None:
    array = numbers(40)
    spec = spec_of_array(array, None)
    frame = pack(array, spec, Compression.NONE, "")
    frame[position % len(frame)] ^= flip

    with pytest.raises(FrameError):
        unpack(bytes(frame), spec)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(noise, spec_of_array(numbers(4), None))


def test_frame_of_another_tensor_is_refused() -> None:
    array = numbers(4, 4)
    frame = bytes(pack(array, spec_of_array(array, None), Compression.NONE, ""))

    with pytest.raises(FrameError, match="another tensor"):
        unpack(frame, spec_of_array(numbers(16), None))


def test_bomb_is_never_inflated_beyond_the_tensor() -> None:
    bomb = np.zeros(1 << 20, np.uint8)
    small = numbers(4, dtype="uint8")
    bomb_frame = pack(bomb, spec_of_array(bomb, None), Compression.ZLIB, "")
    honest = pack(small, spec_of_array(small, None), Compression.ZLIB, "")

    with pytest.raises(FrameError):
        unpack(bytes(bomb_frame), spec_of_array(small, None))
    np.testing.assert_array_equal(unpack(bytes(honest), spec_of_array(small, None)), small)


def test_frame_counts_until_it_expires() -> None:
    array = numbers(20)
    spec = spec_of_array(array, None)
    frame = bytes(pack(array, spec, Compression.NONE, "", expires_unix_s=100.0))

    np.testing.assert_array_equal(unpack(frame, spec, now_unix_s=99.9), array)
    with pytest.raises(FrameError, match="expired"):
        unpack(frame, spec, now_unix_s=100.0)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1_000_000])
def test_no_frame_is_longer_than_its_limit(nbytes: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    spec = spec_of_array(noise, None)

    longest = max(len(pack(noise, spec, compression, "h" * 64, 1e10)) for compression in Compression)

    assert longest <= max_frame_bytes(nbytes)
