"""Network connector: any Redis-compatible server. Keys are random and written once; the server expires them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fleet_common.clock import Clock
from fleet_common.errors import StoreError, StoreFullError
from fleet_common.tensors.framing import Compression
from fleet_common.tensors.keyed import KeyedConnector


class _Client(Protocol):
    """What is used of redis-py; the stubs on the index describe another major release."""

    async def set(self, name: str, value: memoryview, *, nx: bool, px: int) -> object: ...

    async def get(self, name: str) -> bytes | None: ...

    async def unlink(self, name: str) -> object: ...

    async def ping(self) -> object: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach the server.

    Attributes:
        url: `redis://`, `rediss://` (TLS; `ssl_ca_certs=` and the like as query) or `unix://`.
        timeout_s: limit on each connect, send and reply.
    """

    url: str
    compression: Compression = Compression.NONE
    timeout_s: float = 5.0
    max_connections: int = 32


class RedisConnector(KeyedConnector):
    """Tensors as framed values. A cancelled call never leaves a reply behind on a pooled connection."""

    name = "redis"
    #: proto-max-bulk-len of the server.
    max_value_bytes = 512 << 20
    expires_by_itself = True

    def __init__(self, options: RedisOptions, clock: Clock) -> None:
        super().__init__(clock, options.compression)
        self._slots = asyncio.Semaphore(options.max_connections)
        # redis-py drops a connection whose command is cancelled (fixed for CVE-2023-28858; the tests insist on it).
        # One retry at once: a server restart shows as a dead pooled connection at the first use.
        client = redis.asyncio.Redis.from_url(
            options.url,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            max_connections=options.max_connections,
            retry=Retry(NoBackoff(), retries=1, supported_errors=(RedisConnectionError,)),
        )
        self._client = cast(_Client, client)

    async def _write(self, key: str, frame: bytearray, ttl_s: float) -> None:
        async with self._guarded():
            # NX: write-once. It fails for our own retry only (128 random bits), which then has been written already.
            await self._client.set(key, memoryview(frame), nx=True, px=max(1, int(ttl_s * 1000)))

    async def _read(self, key: str, limit_bytes: int) -> bytes | None:
        async with self._guarded():
            return await self._client.get(key)

    async def _remove(self, key: str) -> None:
        async with self._guarded():
            await self._client.unlink(key)

    async def ping(self) -> None:
        """Raises StoreError when the server is out of reach."""
        async with self._guarded():
            await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _guarded(self) -> AsyncIterator[None]:
        """Wait for a free connection, and turn the client's errors into ours."""
        async with self._slots:
            try:
                yield
            except ResponseError as err:
                # "OOM command not allowed when used memory > 'maxmemory'.": the client drops the first word.
                if "maxmemory" not in str(err):
                    raise StoreError(f"redis: {err}") from err
                raise StoreFullError("the server is out of memory") from err
            except (RedisError, RedisTimeoutError, OSError) as err:
                raise StoreError(f"redis: {err}") from err
