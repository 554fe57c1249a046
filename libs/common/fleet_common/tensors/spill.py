"""A reader that cannot map an arena tensor asks its owner over the bus to copy it to the network store."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from fleet_common.bus.port import Bus, BusMessage, Subscription
from fleet_common.errors import BusError, NoResponderError, StoreError
from fleet_common.tensors import layout
from fleet_common.tensors.router import FleetTensorStore, SpillCall
from fleet_contracts import codec, subjects
from fleet_contracts.tensors import ArenaPlace, SpillReply, SpillRequest, TensorRef

log = structlog.get_logger(__name__)

_requests = msgspec.msgpack.Decoder(SpillRequest)
_replies = msgspec.msgpack.Decoder(SpillReply)

#: Copies to the network store at once; more wait their turn.
_MAX_CONCURRENT = 4


def bus_spill(bus: Bus, *, timeout_s: float = 5.0) -> SpillCall:
    """The reader's side: how a store asks the owner of a reference it cannot map."""

    async def ask(ref: TensorRef) -> TensorRef | None:
        name = layout.parse_segment_name(ref.place.segment) if isinstance(ref.place, ArenaPlace) else None
        if not isinstance(ref.place, ArenaPlace) or name is None:
            return None
        try:
            subject = subjects.spill(ref.place.boot_id, name.owner)
            raw = await bus.request(subject, codec.encode(SpillRequest(ref=ref)), timeout_s=timeout_s)
            return _replies.decode(raw).ref
        except ValueError:  # a boot id that fits no subject: nobody can have written it; msgspec's errors included
            return None
        except NoResponderError:
            return None
        except BusError as err:
            raise StoreError("the owner of the tensor cannot be asked") from err

    return ask


class SpillServer:
    """The owner's side: answers spill requests for this process's segments until `stop`."""

    def __init__(self, bus: Bus, store: FleetTensorStore) -> None:
        self._bus = bus
        self._store = store
        self._subscription: Subscription | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def start(self) -> None:
        """Subscribe; without an arena there is nothing to serve."""
        if self._store.arena is not None:
            config = self._store.arena.config
            self._subscription = await self._bus.subscribe(
                subjects.spill(config.boot_id, config.owner), self._on_request
            )

    async def stop(self) -> None:
        """Ask for no more, and let what runs finish being cancelled."""
        if self._subscription is not None:
            await self._subscription.stop()
        for answer in self._answers:
            answer.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def _on_request(self, message: BusMessage) -> None:
        # The bus hands messages over one by one: copies of other readers must not wait behind a large one.
        answer = asyncio.create_task(self._answer(message))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def _answer(self, message: BusMessage) -> None:
        try:
            request = _requests.decode(message.payload)
        except msgspec.DecodeError as err:
            log.warning("spill_request_undecodable", reason=str(err))
            return
        try:
            async with self._slots:
                copy = await self._store.spill(request.ref)
            await self._bus.respond(message, codec.encode(SpillReply(ref=copy)))
        except (StoreError, BusError) as err:
            # No answer: the reader sees a time-out and waits for the store, it does not derive the tensor again.
            log.warning("spill_failed", nbytes=request.ref.nbytes, reason=str(err))


async def serve_spill(bus: Bus, store: FleetTensorStore) -> SpillServer:
    """Answer spill requests for `store`'s arena until the server is stopped."""
    server = SpillServer(bus, store)
    await server.start()
    return server
