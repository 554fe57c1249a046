"""What one step makes, for the steps and the answer that wait for it: piece by piece, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fleet_ingress.core.pipeline_requests import Value

PieceT = TypeVar("PieceT")


@dataclass
class Flow(Generic[PieceT]):
    """The product of a step. Written by one, read by any number, each from the start."""

    _pieces: list[PieceT] = field(default_factory=list)
    _value: Value | None = None
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, piece: PieceT) -> None:
        """One more piece."""
        async with self._news:
            self._pieces.append(piece)
            self._news.notify_all()

    async def end(self, value: Value) -> None:
        """Nothing more comes; this is the whole of it."""
        async with self._news:
            self._value = value
            self._news.notify_all()

    async def whole(self) -> Value:
        """Wait for the end."""
        async with self._news:
            await self._news.wait_for(lambda: self._value is not None)
        assert self._value is not None
        return self._value

    async def pieces(self) -> AsyncIterator[PieceT]:
        """The pieces as they come."""
        num_given = 0
        while True:
            async with self._news:
                while len(self._pieces) == num_given and self._value is None:
                    await self._news.wait()
                fresh = self._pieces[num_given:]
            num_given += len(fresh)
            for piece in fresh:
                yield piece
            if not fresh:
                return
