"""What a streaming engine that makes pictures writes: files by reference, progress, and what it parks meanwhile."""

from __future__ import annotations

import numpy as np

from fleet_common.errors import CancelledWorkError
from fleet_common.stage.context import StageContext
from fleet_common.stage.events import EventLog
from fleet_common.stage.held import Held
from fleet_common.tensors.port import Array
from fleet_contracts.events import Picture, Progress
from fleet_contracts.tensors import TensorRef


class PictureSink:
    """The part of a sink that is about pictures; what it does is said in `port.TokenSink`."""

    def __init__(self, context: StageContext, held: Held, events: EventLog) -> None:
        self._context = context
        self._held = held
        self._events = events

    async def picture(
        self, data: bytes, *, choice: int, index: int, media_type: str, size: tuple[int, int], is_final: bool
    ) -> None:
        context, held = self._context, self._held
        file = np.frombuffer(data, np.uint8)
        # The ingress may be anywhere; on this host it maps our arena, elsewhere it asks us to spill.
        ref = await context.outage.persist(
            lambda: context.store.put(file, ttl_s=self._ttl_s(), locality=context.identity.locality),
            until_unix_s=held.task.deadline_unix_s,
            is_over=lambda: held.is_over,
        )
        held.bytes_out += ref.nbytes
        self._check()
        await self._events.send(
            Picture(
                attempt=held.attempt,
                seq=self._events.next_seq,
                choice=choice,
                index=index,
                media_type=media_type,
                width=size[0],
                height=size[1],
                file=ref,
                is_final=is_final,
            )
        )

    async def progress(self, done_ratio: float) -> None:
        self._check()
        event = Progress(attempt=self._held.attempt, seq=self._events.next_seq, done_ratio=done_ratio)
        await self._events.send(event)

    async def keep(self, array: Array) -> TensorRef:
        return await self._context.store.put(array, ttl_s=self._ttl_s(), locality=self._context.identity.locality)

    async def fetch(self, ref: TensorRef) -> Array:
        with await self._context.store.get(ref) as lease:
            return np.array(lease.array)

    async def forget(self, ref: TensorRef) -> None:
        await self._context.store.release(ref)

    def _check(self) -> None:
        if self._held.is_over:
            raise CancelledWorkError("nobody waits for this picture")

    def _ttl_s(self) -> float:
        left_s = self._held.task.deadline_unix_s - self._context.clock.unix_s()
        return max(1.0, left_s) + self._context.settings.ack_wait_s
