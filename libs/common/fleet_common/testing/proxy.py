"""A TCP proxy that a test can cut: one client loses the server while the others keep it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK_BYTES = 65536


class Proxy:
    """Forwards connections to a loopback port.

    Attributes:
        is_open: False refuses new connections by closing them at once.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.is_open = True
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self.is_open = False
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """Let connections through again."""
        self.is_open = True

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Proxy]:
        """Listen on a free loopback port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.get_running_loop().create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(_CHUNK_BYTES):
                sink.write(chunk)
                await sink.drain()
        self._writers.discard(sink)
        sink.close()
