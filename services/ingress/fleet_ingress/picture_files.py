"""Files of one request's pictures: read from the store before the event that names them counts as arrived.

Until the end is confirmed the worker can be asked again; after that nobody could make a lost picture once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleet_common.errors import TensorNotFoundError
from fleet_contracts.events import Attempt, Picture
from fleet_contracts.tensors import TensorRef

#: Reads a file; waits while the store is out of reach. Raises TensorNotFoundError.
ReadFile = Callable[[TensorRef], Awaitable[bytes]]

_Key = tuple[int, int]


class PictureFiles:
    """By choice and position: each is read once, whoever names it and however often."""

    def __init__(self) -> None:
        self._files: dict[_Key, bytes] = {}
        self._seen: set[_Key] = set()
        self._reads: dict[_Key, asyncio.Future[None]] = {}
        self._lost_by: set[tuple[int, int]] = set()

    async def fetch(self, picture: Picture, read: ReadFile) -> bool:
        """Have the file here; False when the store has lost it."""
        key = (picture.choice, picture.index)
        if key in self._seen:
            return True
        running = self._reads.get(key)
        if running is not None:
            await asyncio.shield(running)
            return key in self._seen
        done = self._reads[key] = asyncio.get_running_loop().create_future()
        try:
            self._files[key] = await read(picture.file)
            self._seen.add(key)
        except TensorNotFoundError:
            self._lost_by.add(picture.attempt.fence)
            return False
        finally:
            del self._reads[key]
            done.set_result(None)
        return True

    async def all_read(self) -> None:
        """Wait for the files that are being read."""
        for running in list(self._reads.values()):
            await asyncio.shield(running)

    def has_lost(self, attempt: Attempt) -> bool:
        """Whether a file of that attempt is gone."""
        return attempt.fence in self._lost_by

    def take(self, picture: Picture) -> bytes:
        """The file, for the client; it is kept no longer."""
        return self._files.pop((picture.choice, picture.index), b"")

    def clear(self) -> None:
        """The client is gone."""
        self._files.clear()
