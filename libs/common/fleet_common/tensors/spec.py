"""What may be stored, and whether a reference makes sense: checked before anything is mapped or allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from fleet_common.errors import ContractError
from fleet_common.tensors.port import Array
from fleet_contracts.tensors import TensorRef

#: numpy has no bfloat16: the bits are kept as uint16 and the reference says what they are.
BFLOAT16 = "bfloat16"

_NUMPY_NAMES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

#: dtype name of a reference -> native numpy dtype of the stored bytes. Nothing else is ever opened, so a forged
#: reference can name no object dtype.
STORED_DTYPES: dict[str, np.dtype[np.generic]] = {name: np.dtype(name) for name in _NUMPY_NAMES} | {
    BFLOAT16: np.dtype("uint16")
}

#: numpy refuses more dimensions.
_MAX_DIMS = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes.

    Attributes:
        dtype: name as in `TensorRef.dtype`.
        stored: native numpy dtype of the bytes.
        nbytes: `prod(shape) * stored.itemsize`.
    """

    dtype: str
    stored: np.dtype[np.generic]
    shape: tuple[int, ...]
    nbytes: int


def spec_of_array(array: Array, dtype: str | None) -> TensorSpec:
    """Describe an array that is to be stored.

    Raises:
        ContractError: a dtype that is not stored, or `dtype` that contradicts the array's.
    """
    name = dtype or array.dtype.name
    stored = STORED_DTYPES.get(name)
    if stored is None or array.dtype.name != stored.name:
        raise ContractError(f"a {array.dtype.name} array cannot be stored as {name}")
    return TensorSpec(dtype=name, stored=stored, shape=array.shape, nbytes=array.nbytes)


def spec_of_ref(ref: TensorRef) -> TensorSpec:
    """Check a reference against itself.

    Raises:
        ContractError: unknown dtype, impossible shape, or `nbytes` that shape and dtype do not give.
    """
    stored = STORED_DTYPES.get(ref.dtype)
    if stored is None:
        raise ContractError(f"dtype {ref.dtype[:40]!r} is not stored")
    if len(ref.shape) > _MAX_DIMS or any(size < 0 for size in ref.shape):
        raise ContractError("impossible shape")
    if math.prod(ref.shape) * stored.itemsize != ref.nbytes:
        raise ContractError(f"shape {ref.shape} of {ref.dtype} is not {ref.nbytes} bytes")
    return TensorSpec(dtype=ref.dtype, stored=stored, shape=ref.shape, nbytes=ref.nbytes)


def native(array: Array, spec: TensorSpec) -> Array:
    """The array as C-contiguous native bytes: itself when it is that already."""
    wanted: DTypeLike = spec.stored
    return np.ascontiguousarray(array, dtype=wanted).reshape(spec.shape)


def view_of(buffer: bytes | memoryview, spec: TensorSpec, offset: int = 0) -> Array:
    """Read-only array over bytes that already lie in memory; no copy."""
    array: Array = np.ndarray(spec.shape, spec.stored, buffer=buffer, offset=offset)
    array.flags.writeable = False
    return array
