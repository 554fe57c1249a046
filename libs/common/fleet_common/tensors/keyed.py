"""What network connectors share: framed tensors under random keys that are written once."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fleet_common.clock import Clock
from fleet_common.errors import ContractError, StoreError, StoreFullError, TensorNotFoundError
from fleet_common.tensors.framing import Compression, FrameError, max_frame_bytes, pack, unpack
from fleet_common.tensors.held import Counters
from fleet_common.tensors.port import Array, Lease, StoreStats
from fleet_common.tensors.spec import TensorSpec, spec_of_array, spec_of_ref
from fleet_contracts.tensors import NetworkPlace, TensorRef

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PREFIX = "fleet:t:"
_KEY = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")

#: Framing above this is done in a thread: checksum and copy of 8 MB hold the loop for about 2 ms.
_LOOP_FRAME_BYTES = 4 << 20


class KeyedConnector(ABC):
    """A connector over a store of bytes by key; subclasses move the bytes.

    The methods they write raise StoreError when the store is out of reach, StoreFullError when it has no room.
    """

    #: Registered name, as in `NetworkPlace.connector`.
    name = ""
    #: The store's own limit on one value.
    max_value_bytes = 512 << 20
    #: The store expires values by itself, to the millisecond; else the frame says until when it counts.
    expires_by_itself = False

    def __init__(self, clock: Clock, compression: Compression) -> None:
        self._clock = clock
        self._compression = compression
        self._counters = Counters()

    @abstractmethod
    async def _write(self, key: str, frame: bytearray, ttl_s: float) -> None:
        """Keep bytes under a key that is new."""

    @abstractmethod
    async def _read(self, key: str, limit_bytes: int) -> bytes | memoryview | None:
        """The bytes of a key, None when it is unknown. Longer than `limit_bytes` cannot be what is looked for."""

    @abstractmethod
    async def _remove(self, key: str) -> None:
        """Forget a key. Unknown keys are fine."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the store."""

    async def put(self, array: Array, *, ttl_s: float, dtype: str | None = None, content_hash: str = "") -> TensorRef:
        spec = spec_of_array(array, dtype)
        if max_frame_bytes(spec.nbytes) > self.max_value_bytes:
            self._counters.full_total += 1
            raise StoreFullError(f"{spec.nbytes} bytes are more than one value holds")
        expires_unix_s = self._clock.unix_s() + ttl_s
        limit_unix_s = 0.0 if self.expires_by_itself else expires_unix_s
        frame = await _off_loop(spec.nbytes, pack, array, spec, self._compression, content_hash, limit_unix_s)
        key = _PREFIX + secrets.token_hex(16)
        try:
            await self._write(key, frame, ttl_s)
        except StoreFullError:
            self._counters.full_total += 1
            raise
        self._counters.put_total += 1
        return TensorRef(
            place=NetworkPlace(connector=self.name, key=key),
            dtype=spec.dtype,
            shape=spec.shape,
            nbytes=spec.nbytes,
            content_hash=content_hash,
            expires_unix_s=expires_unix_s,
        )

    async def get(self, ref: TensorRef) -> Lease:
        spec = spec_of_ref(ref)
        try:
            array = await self._fetch(_key_of(ref), spec)
        except FrameError as err:
            self._counters.miss_total += 1
            raise TensorNotFoundError(ref, str(err)) from err
        return self._counters.lease(array)

    async def _fetch(self, key: str, spec: TensorSpec) -> Array:
        """Raises FrameError for anything but the tensor that was put."""
        limit_bytes = max_frame_bytes(spec.nbytes)
        if limit_bytes > self.max_value_bytes:
            raise FrameError("more bytes than one value holds")
        frame = await self._read(key, limit_bytes)
        if not frame:
            raise FrameError("unknown or expired key")
        return await _off_loop(len(frame), unpack, frame, spec, self._clock.unix_s())

    async def release(self, ref: TensorRef) -> None:
        await self._remove(_key_of(ref))

    def stats(self) -> StoreStats:
        counters = self._counters
        return StoreStats(
            used_bytes=0,
            capacity_bytes=0,
            num_tensors=0,
            num_leases=counters.num_leases,
            put_total=counters.put_total,
            get_total=counters.get_total,
            miss_total=counters.miss_total,
            full_total=counters.full_total,
        )


def _key_of(ref: TensorRef) -> str:
    if not isinstance(ref.place, NetworkPlace) or not _KEY.fullmatch(ref.place.key):
        raise ContractError("not a key of ours")
    return ref.place.key


def knock(address: str, timeout_s: float) -> None:
    """Does anybody listen at host:port? Client libraries would find out slowly, and with the whole process held up.

    Raises StoreError. Blocks: only in a thread.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as err:
        raise StoreError(f"the store at {address} cannot be reached: {err}") from err


async def _off_loop(nbytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Large frames in a thread, small ones here."""
    if nbytes > _LOOP_FRAME_BYTES:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)
