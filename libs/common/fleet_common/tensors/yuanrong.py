"""Network connector: openYuanrong's data system. Its worker on this host keeps the bytes and fetches those of others.

Values expire on the server in whole seconds; the frame says when exactly. The client holds the interpreter's lock while
it waits for its worker, whatever thread it runs in: hence one thread, a short time-out, and a pause after a failure in
which every call fails at once, so that an outage freezes the process for one time-out and not for one per call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from fleet_common.clock import Clock
from fleet_common.errors import StoreError, StoreFullError
from fleet_common.tensors.framing import Compression
from fleet_common.tensors.keyed import KeyedConnector, knock

_T = TypeVar("_T")

#: The client tells what happened in words only: "code: [Key not found], msg: ...".
_UNKNOWN_KEY = "code: [Key not found]"
#: As the code, or among what was answered to the tries of a call whose last one had no time left.
_NO_ROOM = "Out of memory"

_MAX_TTL_S = (1 << 31) - 1


class YuanrongClient(Protocol):
    """What is used of `yr.datasystem.KVClient`; errors are RuntimeErrors."""

    def init(self) -> None: ...

    def set(self, key: str, val: bytearray, *, ttl_second: int) -> None: ...

    def get(self, keys: list[str]) -> list[bytes | None]: ...

    def delete(self, keys: list[str]) -> list[str]: ...


#: Makes a client that is not connected, from host, port and time-out in milliseconds.
ClientFactory = Callable[[str, int, int], YuanrongClient]


@dataclass(frozen=True, slots=True)
class YuanrongOptions:
    """How to reach the worker of this host.

    Attributes:
        worker_address: host:port of datasystem_worker. On the same host bytes go through memory that both have mapped,
            unless the worker was started with `--ipc_through_shared_memory=false`.
        timeout_s: limit on each call; the interpreter stands still that long when the worker hangs.
        pause_s: after a failure every call fails at once for that long.
    """

    worker_address: str
    compression: Compression = Compression.NONE
    timeout_s: float = 1.0
    pause_s: float = 2.0


class YuanrongConnector(KeyedConnector):
    """Tensors as framed values. Connects at the first use; the client reconnects by itself."""

    name = "yuanrong"

    def __init__(
        self,
        options: YuanrongOptions,
        clock: Clock,
        client: ClientFactory | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises StoreError when the library is not installed."""
        super().__init__(clock, options.compression)
        self._options = options
        self._make_client = client or _installed()
        self._client: YuanrongClient | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="yuanrong")
        self._monotonic = monotonic
        self._paused_until_s = 0.0
        self._reason = ""
        #: Puts of at least so many bytes are refused until then: finding no room takes the client a whole time-out.
        self._full_from_bytes = 0
        self._full_until_s = 0.0

    async def _write(self, key: str, frame: bytearray, ttl_s: float) -> None:
        expiry_s = min(_MAX_TTL_S, max(1, math.ceil(ttl_s)))
        await self._call(lambda client: self._set(client, key, frame, expiry_s))

    async def _read(self, key: str, limit_bytes: int) -> bytes | None:
        return await self._call(lambda client: _found(client, key))

    async def _remove(self, key: str) -> None:
        await self._call(lambda client: client.delete([key]))

    async def close(self) -> None:
        self._client = None
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[YuanrongClient], _T]) -> _T:
        """Run a call in our thread. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, work)

    def _guarded(self, work: Callable[[YuanrongClient], _T]) -> _T:
        """In our thread: connect if need be, call, and turn the client's errors into ours."""
        if self._monotonic() < self._paused_until_s:
            raise StoreError(self._reason)
        try:
            return work(self._connected())
        except RuntimeError as err:
            self._reason = f"yuanrong: {_first_line(err)}"
            self._paused_until_s = self._monotonic() + self._options.pause_s
            raise StoreError(self._reason) from err

    def _set(self, client: YuanrongClient, key: str, frame: bytearray, expiry_s: int) -> None:
        if len(frame) >= self._full_from_bytes and self._monotonic() < self._full_until_s:
            raise StoreFullError("yuanrong had no room a moment ago")
        try:
            client.set(key, frame, ttl_second=expiry_s)
        except RuntimeError as err:
            if _NO_ROOM not in str(err):
                raise
            self._full_from_bytes, self._full_until_s = len(frame), self._monotonic() + self._options.pause_s
            raise StoreFullError("yuanrong has no room") from err

    def _connected(self) -> YuanrongClient:
        if self._client is None:
            knock(self._options.worker_address, self._options.timeout_s)
            host, _, port = self._options.worker_address.rpartition(":")
            client = self._make_client(host, int(port), int(self._options.timeout_s * 1000))
            client.init()
            self._client = client
        return self._client


def _found(client: YuanrongClient, key: str) -> bytes | None:
    """The value of a key, None when there is none."""
    try:
        values = client.get([key])
    except RuntimeError as err:
        if _UNKNOWN_KEY in str(err):
            return None
        raise
    return values[0] if values else None


def _first_line(err: RuntimeError) -> str:
    return str(err).partition("\n")[0][:200]


def _installed() -> ClientFactory:
    """Clients of the installed package. Raises StoreError when it cannot be loaded."""
    try:
        import yr.datasystem as binding
    except ImportError as err:
        raise StoreError(
            f"yuanrong cannot be loaded ({err}): install the extra omnifleet[yuanrong] (package "
            "openyuanrong-datasystem)"
        ) from err
    library: Any = binding

    def make(host: str, port: int, timeout_ms: int) -> YuanrongClient:
        client = library.KVClient(host, port, connect_timeout_ms=timeout_ms, req_timeout_ms=timeout_ms)
        return cast(YuanrongClient, client)

    return make
