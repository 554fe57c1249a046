"""Network connector: a Mooncake store. A master keeps the keys, storage nodes (or the workers themselves) the bytes.

Mooncake knows leases and no time to live, so the frame says until when it counts, and its memory is pinned that long:
afterwards the master may evict it when it needs room (`--allow_evict_soft_pinned_objects=false` keeps it from evicting
earlier; where it does, that is a miss). A storage node that dies takes its bytes along: misses as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from fleet_common.clock import Clock
from fleet_common.errors import StoreError, StoreFullError
from fleet_common.tensors.framing import Compression, FrameError
from fleet_common.tensors.keyed import KeyedConnector, knock
from fleet_common.tensors.port import Array

_T = TypeVar("_T")

_OK = 0
#: Result codes of the client (its `types.h`).
_NO_ROOM = -200
_WRONG_SIZE = -600
_UNKNOWN_KEY = -704
#: The node that holds the bytes is gone, or going: nobody else has them.
_HOLDER_LOST = -800

#: The longest pin the master grants unless told otherwise (`--max_kv_soft_pin_ttl`).
_MAX_PIN_MS = 86_400_000

_NUM_THREADS = 8


class MooncakeClient(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`; every call blocks, without the interpreter's lock."""

    def setup(self, config: dict[str, str]) -> int: ...

    def register_buffer(self, pointer: int, nbytes: int) -> int: ...

    def unregister_buffer(self, pointer: int) -> int: ...

    def put_from(self, key: str, pointer: int, nbytes: int, config: object) -> int: ...

    def get_into(self, key: str, pointer: int, nbytes: int) -> int: ...

    def remove(self, key: str, force: bool) -> int: ...

    def close(self) -> int: ...


class MooncakeLibrary(Protocol):
    """The Python binding."""

    def client(self) -> MooncakeClient:
        """A client that is not set up yet."""

    def pinned(self, ttl_ms: int) -> object:
        """Options of a put whose bytes are not evicted for that long."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """How to reach the store.

    Attributes:
        master_address: host:port of mooncake_master.
        host: address of this host that the others reach.
        transport: `tcp`, `rdma`, or whatever else the library was built with.
        devices: RDMA devices, comma separated; "" for tcp.
        segment_bytes: memory this process lends to the store; 0 = storage nodes hold everything.
        timeout_s: limit on each call.
    """

    master_address: str
    host: str = "127.0.0.1"
    transport: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    compression: Compression = Compression.NONE
    timeout_s: float = 5.0


class _Installed:
    """The binding of the installed package. Raises StoreError when it cannot be loaded."""

    def __init__(self) -> None:
        try:
            import mooncake.store as binding
        except ImportError as err:
            raise StoreError(
                f"mooncake cannot be loaded ({err}): install the extra omnifleet[mooncake] (package "
                "mooncake-transfer-engine-non-cuda) and its libraries (deploy/install-mooncake-libs.sh)"
            ) from err
        self._binding: Any = binding

    def client(self) -> MooncakeClient:
        return cast(MooncakeClient, self._binding.MooncakeDistributedStore())

    def pinned(self, ttl_ms: int) -> object:
        config = self._binding.ReplicateConfig()
        config.soft_pin_action = self._binding.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = ttl_ms
        return config


class MooncakeConnector(KeyedConnector):
    """Tensors as framed values, moved straight between our own buffers and the nodes that hold them.

    Connects at the first use, and again at the next one when the master was out of reach.
    """

    name = "mooncake"

    def __init__(self, options: MooncakeOptions, clock: Clock, library: MooncakeLibrary | None = None) -> None:
        """Raises StoreError when the library is not installed."""
        super().__init__(clock, options.compression)
        self._options = options
        self._library = library or _Installed()
        self._client: MooncakeClient | None = None
        self._connecting = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mooncake")

    async def _write(self, key: str, frame: bytearray, ttl_s: float) -> None:
        config = self._library.pinned(min(_MAX_PIN_MS, max(1, int(ttl_s * 1000))))
        array: Array = np.frombuffer(frame, np.uint8)
        code = await self._call(
            lambda client: _registered(client, array, lambda at: client.put_from(key, at, array.nbytes, config))
        )
        if code == _NO_ROOM:
            raise StoreFullError("mooncake has no room")
        if code != _OK:
            raise StoreError(f"mooncake: put gave {code}")

    async def _read(self, key: str, limit_bytes: int) -> memoryview | None:
        array: Array = np.empty(limit_bytes, np.uint8)
        got = await self._call(
            lambda client: _registered(client, array, lambda at: client.get_into(key, at, array.nbytes))
        )
        if got == _WRONG_SIZE:
            raise FrameError("longer than the tensor")
        if got == _HOLDER_LOST:
            raise FrameError("the node that held it is gone")
        if got < 0 and got != _UNKNOWN_KEY:
            raise StoreError(f"mooncake: get gave {got}")
        # The array itself: numpy looks behind a read-only memoryview of a writable one.
        array.flags.writeable = False
        return array.data[:got] if got > 0 else None

    async def _remove(self, key: str) -> None:
        # Forced: a lease of a reader would refuse it. One that still copies finds the checksum wrong, which is a miss.
        code = await self._call(lambda client: client.remove(key, True))
        if code not in (_OK, _UNKNOWN_KEY, _HOLDER_LOST):
            raise StoreError(f"mooncake: remove gave {code}")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, client.close)
        self._threads.shutdown(wait=False)

    async def _call(self, work: Callable[[MooncakeClient], _T]) -> _T:
        """Run a blocking call in a thread of ours; when it takes too long it ends unheeded."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(self._connected()))
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await running
        except TimeoutError as err:
            raise StoreError(f"mooncake: no answer within {self._options.timeout_s} s") from err

    def _connected(self) -> MooncakeClient:
        """In a thread. Raises StoreError."""
        with self._connecting:
            if self._client is None:
                # `setup` would try 20 times, for minutes, and hold the interpreter's lock meanwhile.
                knock(self._options.master_address, self._options.timeout_s)
                client = self._library.client()
                if (code := client.setup(_setup_of(self._options))) != _OK:
                    raise StoreError(f"mooncake: the master at {self._options.master_address} gave {code}")
                self._client = client
            return self._client


def _setup_of(options: MooncakeOptions) -> dict[str, str]:
    return {
        "local_hostname": options.host,
        # Peers find each other through the master; no etcd, no HTTP server.
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(options.segment_bytes),
        "local_buffer_size": "0",
        "protocol": options.transport,
        "rdma_devices": options.devices,
        "master_server_addr": options.master_address,
    }


def _registered(client: MooncakeClient, array: Array, move: Callable[[int], int]) -> int:
    """Register a buffer for the time of one transfer. The array is held until the call is over."""
    pointer: int = array.ctypes.data
    if (code := client.register_buffer(pointer, array.nbytes)) != _OK:
        return code
    try:
        return move(pointer)
    finally:
        client.unregister_buffer(pointer)
