"""What every tensor connector must do, as a pytest class: subclass it and give it a `rig` fixture."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from fleet_common.errors import ContractError, StoreFullError, TensorNotFoundError
from fleet_common.tensors.port import Array, Connector
from fleet_contracts import codec
from fleet_contracts.tensors import InlinePlace, TensorRef

_TTL_S = 30.0
_DTYPES = ("bool", "int8", "int64", "uint8", "uint16", "float16", "float32", "float64", "complex64")


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorRig:
    """A connector and the hands to break it.

    Attributes:
        pass_s: let that many seconds pass on the connector's clock.
        lose_all: make every stored tensor vanish, as a flush or a dead host would.
        fill: leave no room.
    """

    connector: Connector
    pass_s: Callable[[float], Awaitable[None]]
    lose_all: Callable[[], Awaitable[None]]
    fill: Callable[[], Awaitable[None]]


def numbers(*shape: int, dtype: str = "float32") -> Array:
    """Distinct values of a shape."""
    array: Array = (np.arange(int(np.prod(shape))).reshape(shape) % 251).astype(dtype)
    return array


def over_the_wire(ref: TensorRef) -> TensorRef:
    """The reference as a reader gets it."""
    return msgspec.msgpack.decode(codec.encode(ref), type=TensorRef)


class ConnectorConformance:
    """The suite. Times are on the connector's own clock, which may be the machine's."""

    @pytest.mark.parametrize("dtype", _DTYPES)
    async def test_every_dtype_comes_back_as_it_went(self, rig: ConnectorRig, dtype: str) -> None:
        array = numbers(7, 5, dtype=dtype)

        ref = over_the_wire(await rig.connector.put(array, ttl_s=_TTL_S))

        with await rig.connector.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, array)
            assert lease.array.dtype == array.dtype
            assert (ref.dtype, ref.shape, ref.nbytes) == (dtype, (7, 5), array.nbytes)

    async def test_bfloat16_travels_as_uint16_bits(self, rig: ConnectorRig) -> None:
        bits = numbers(4, 3, dtype="uint16")

        ref = await rig.connector.put(bits, ttl_s=_TTL_S, dtype="bfloat16")

        with await rig.connector.get(over_the_wire(ref)) as lease:
            np.testing.assert_array_equal(lease.array, bits)
            assert (ref.dtype, lease.array.dtype) == ("bfloat16", np.dtype("uint16"))

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 2, 3, 4, 5)])
    async def test_odd_shapes_come_back(self, rig: ConnectorRig, shape: tuple[int, ...]) -> None:
        array = np.ones(shape, np.float32)

        with await rig.connector.get(await rig.connector.put(array, ttl_s=_TTL_S)) as lease:
            np.testing.assert_array_equal(lease.array, array)
            assert lease.array.shape == shape

    async def test_strided_and_foreign_endian_arrays_are_stored_native_and_contiguous(self, rig: ConnectorRig) -> None:
        array = numbers(6, 8)
        odd: Array = np.asarray(array[::2, ::-1].T, dtype=">f4")

        with await rig.connector.get(await rig.connector.put(odd, ttl_s=_TTL_S)) as lease:
            np.testing.assert_array_equal(lease.array, array[::2, ::-1].T)
            assert lease.array.flags.c_contiguous
            assert lease.array.dtype.isnative

    async def test_large_tensor_comes_back(self, rig: ConnectorRig) -> None:
        array = numbers(3, 1024, 1024, dtype="uint8")

        with await rig.connector.get(await rig.connector.put(array, ttl_s=_TTL_S)) as lease:
            np.testing.assert_array_equal(lease.array, array)

    async def test_view_is_read_only(self, rig: ConnectorRig) -> None:
        with await rig.connector.get(await rig.connector.put(numbers(9), ttl_s=_TTL_S)) as lease:
            with pytest.raises(ValueError, match="read-only"):
                lease.array[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                lease.array.flags.writeable = True

    async def test_later_changes_of_the_source_do_not_show(self, rig: ConnectorRig) -> None:
        array = numbers(100)
        before = array.copy()

        ref = await rig.connector.put(array, ttl_s=_TTL_S)
        array[:] = 0

        with await rig.connector.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, before)

    async def test_reference_carries_hash_and_expiry(self, rig: ConnectorRig) -> None:
        short = await rig.connector.put(numbers(9), ttl_s=10, content_hash="abc")
        long = await rig.connector.put(numbers(9), ttl_s=20)

        assert (short.content_hash, long.content_hash) == ("abc", "")
        assert long.expires_unix_s - short.expires_unix_s == pytest.approx(10, abs=1)

    async def test_tensors_do_not_share_bytes(self, rig: ConnectorRig) -> None:
        arrays = [numbers(50 + i) * (i + 1) for i in range(20)]

        refs = await asyncio.gather(*(rig.connector.put(array, ttl_s=_TTL_S) for array in arrays))

        leases = await asyncio.gather(*(rig.connector.get(ref) for ref in refs))
        for lease, array in zip(leases, arrays, strict=True):
            np.testing.assert_array_equal(lease.array, array)
            lease.close()
        assert len({ref.place for ref in refs}) == 20

    async def test_released_tensor_is_a_miss(self, rig: ConnectorRig) -> None:
        ref = await rig.connector.put(numbers(9), ttl_s=_TTL_S)

        await rig.connector.release(ref)

        with pytest.raises(TensorNotFoundError) as miss:
            await rig.connector.get(ref)
        assert miss.value.ref == ref

    async def test_releasing_twice_is_fine(self, rig: ConnectorRig) -> None:
        ref = await rig.connector.put(numbers(9), ttl_s=_TTL_S)

        await rig.connector.release(ref)
        other = await rig.connector.put(numbers(8), ttl_s=_TTL_S)
        await rig.connector.release(ref)

        with await rig.connector.get(other) as lease:
            np.testing.assert_array_equal(lease.array, numbers(8))

    async def test_lease_outlives_release_and_other_puts(self, rig: ConnectorRig) -> None:
        array = numbers(5000)
        ref = await rig.connector.put(array, ttl_s=_TTL_S)
        lease = await rig.connector.get(ref)

        await rig.connector.release(ref)
        for _ in range(5):
            await rig.connector.put(np.zeros(5000, np.float32), ttl_s=_TTL_S)

        np.testing.assert_array_equal(lease.array, array)
        lease.close()

    async def test_expired_tensor_is_a_miss(self, rig: ConnectorRig) -> None:
        ref = await rig.connector.put(numbers(9), ttl_s=0.05)

        await rig.pass_s(0.1)

        with pytest.raises(TensorNotFoundError):
            await rig.connector.get(ref)

    async def test_lost_tensor_is_a_miss(self, rig: ConnectorRig) -> None:
        ref = await rig.connector.put(numbers(9), ttl_s=_TTL_S)

        await rig.lose_all()

        with pytest.raises(TensorNotFoundError):
            await rig.connector.get(ref)

    async def test_full_store_refuses_and_keeps_what_it_has(self, rig: ConnectorRig) -> None:
        ref = await rig.connector.put(numbers(9), ttl_s=_TTL_S)
        await rig.fill()

        with pytest.raises(StoreFullError):
            await rig.connector.put(np.zeros(3 << 20, np.uint8), ttl_s=_TTL_S)

        with await rig.connector.get(ref) as lease:
            np.testing.assert_array_equal(lease.array, numbers(9))
        assert rig.connector.stats().full_total >= 1

    @pytest.mark.parametrize(
        "lie",
        [
            {"nbytes": 1 << 60},
            {"nbytes": -16},
            {"shape": (5,)},
            {"shape": (-2, -2)},
            {"shape": (1 << 40, 1 << 40)},
            {"shape": (1,) * 40},
            {"dtype": "object"},
            {"dtype": "O"},
            {"dtype": "float32,float32"},
            {"dtype": ""},
            {"place": InlinePlace(data=b"1234")},
        ],
    )
    async def test_reference_that_contradicts_itself_is_refused(
        self, rig: ConnectorRig, lie: dict[str, object]
    ) -> None:
        ref = await rig.connector.put(numbers(4), ttl_s=_TTL_S)

        with pytest.raises(ContractError):
            await rig.connector.get(msgspec.structs.replace(ref, **lie))

    @pytest.mark.parametrize("lie", [{"dtype": "int32"}, {"shape": (2, 2)}, {"shape": (2,), "nbytes": 8}])
    async def test_reference_to_another_tensor_is_a_miss(self, rig: ConnectorRig, lie: dict[str, object]) -> None:
        ref = await rig.connector.put(numbers(4), ttl_s=_TTL_S)

        with pytest.raises(TensorNotFoundError):
            await rig.connector.get(msgspec.structs.replace(ref, **lie))

    async def test_objects_and_mislabelled_arrays_are_refused(self, rig: ConnectorRig) -> None:
        with pytest.raises(ContractError):
            await rig.connector.put(np.array([object()]), ttl_s=_TTL_S)
        with pytest.raises(ContractError):
            await rig.connector.put(numbers(4), ttl_s=_TTL_S, dtype="bfloat16")

    async def test_stats_count_leases_and_calls(self, rig: ConnectorRig) -> None:
        ref = await rig.connector.put(numbers(9), ttl_s=_TTL_S)
        first = await rig.connector.get(ref)
        second = await rig.connector.get(ref)

        opened = rig.connector.stats()
        for _ in range(2):
            first.close()
            second.close()
        await rig.connector.release(ref)
        with pytest.raises(TensorNotFoundError):
            await rig.connector.get(ref)
        closed = rig.connector.stats()

        assert (opened.num_leases, closed.num_leases) == (2, 0)
        assert (closed.put_total, closed.get_total, closed.miss_total) == (1, 2, 1)
