"""What a worker knows of the fleet from mirrors of the buckets: routing table, tombstones, ingresses."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleet_common.bus.port import Bus, BusMessage, KeyValue, KvMirror, Subscription
from fleet_common.clock import Clock
from fleet_common.scheduling.route import refusing_pools
from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.control import RoutingTable, WorkerInfo

log = structlog.get_logger(__name__)

_INGRESS_PREFIX = "ingress."
_WORKER_PREFIX = "worker."
#: Broadcast cancels remembered; the bucket's mirror knows them for good.
_MAX_BROADCASTS = 4096


class IngressWatch:
    """Which ingresses are gone. Pure: an absence counts only once it has lasted `grace_s`.

    A lease that is missing right now may belong to an ingress that has just started, or to a control plane that has
    just come back; work is dropped for neither.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._present: set[str] = set()
        self._absent_since_s: dict[str, float] = {}

    def seen(self, ingress_id: str) -> None:
        """Its lease is there."""
        self._present.add(ingress_id)
        self._absent_since_s.pop(ingress_id, None)

    def lost(self, ingress_id: str, now_s: float) -> None:
        """Its lease ended."""
        self._present.discard(ingress_id)
        self._absent_since_s.setdefault(ingress_id, now_s)

    def start_again(self, now_s: float) -> None:
        """The mirror was away until now: every absence counts from here."""
        self._absent_since_s = dict.fromkeys(self._absent_since_s, now_s)

    def is_gone(self, ingress_id: str, now_s: float) -> bool:
        """Whether it has been absent for longer than the grace; the first look at an unknown one starts its time."""
        if ingress_id in self._present:
            return False
        return now_s - self._absent_since_s.setdefault(ingress_id, now_s) > self._grace_s


class MirrorView:
    """`FleetView` over the bus.

    Args:
        lease_s: registry lease; an ingress is gone after two of them.
        on_cancel: told the id of every request that is cancelled.
        on_table: told that another routing table is in force.
    """

    def __init__(self, bus: Bus, clock: Clock, *, lease_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._watch = IngressWatch(2 * lease_s)
        self._table: RoutingTable | None = None
        self._workers: dict[str, WorkerInfo] = {}
        self._broadcasts: dict[str, None] = {}
        self._mirrors: list[KvMirror] = []
        self._tombstones: KvMirror | None = None
        self._tombstone_bucket: KeyValue | None = None
        self._subscription: Subscription | None = None
        self._on_cancel: Callable[[str], None] = lambda request_id: None
        self._on_table: Callable[[], None] = lambda: None

    async def open(
        self, *, on_cancel: Callable[[str], None] | None = None, on_table: Callable[[], None] | None = None
    ) -> None:
        """Fill the mirrors. Raises BusError."""
        self._on_cancel = on_cancel or self._on_cancel
        self._on_table = on_table or self._on_table
        self._bus.on_reconnect(self._reconnected)
        self._tombstone_bucket = await self._bus.kv(subjects.BUCKET_TOMBSTONES)
        self._tombstones = await self._tombstone_bucket.mirror(self._tombstone_changed)
        routing = await (await self._bus.kv(subjects.BUCKET_ROUTING)).mirror(self._routing_changed)
        registry = await (await self._bus.kv(subjects.BUCKET_REGISTRY)).mirror(self._registry_changed)
        self._mirrors = [self._tombstones, routing, registry]
        self._subscription = await self._bus.subscribe(subjects.CANCEL, self._cancel_heard)

    async def close(self) -> None:
        """Follow no longer."""
        if self._subscription is not None:
            await self._subscription.stop()
        for mirror in self._mirrors:
            await mirror.stop()

    @property
    def table(self) -> RoutingTable | None:
        return self._table

    def refusing_pools(self, stage: Stage, tags: frozenset[str]) -> frozenset[str]:
        return refusing_pools(self._workers.values(), stage, tags)

    def is_cancelled(self, request_id: str) -> bool:
        if request_id in self._broadcasts:
            return True
        return self._tombstones is not None and self._tombstones.get(request_id) is not None

    def is_ingress_gone(self, ingress_id: str) -> bool:
        return self._bus.is_connected and self._watch.is_gone(ingress_id, self._clock.monotonic_s())

    def adapter_holders(self, stage: Stage, pool: str, adapter: str) -> frozenset[WorkerId]:
        return frozenset(
            worker.worker_id
            for worker in self._workers.values()
            if (worker.stage, worker.pool, worker.state) == (stage, pool, "ready") and adapter in worker.adapters
        )

    async def has_tombstone(self, request_id: str) -> bool:
        bucket = self._tombstone_bucket
        return bucket is not None and await bucket.get(request_id) is not None

    async def _cancel_heard(self, message: BusMessage) -> None:
        try:
            request_id = codec.decode_cancel(message.payload).request_id
        except codec.DecodeError as error:
            log.warning("cancel_undecodable", reason=str(error))
            return
        while len(self._broadcasts) >= _MAX_BROADCASTS:
            del self._broadcasts[next(iter(self._broadcasts))]
        self._broadcasts[request_id] = None
        self._on_cancel(request_id)

    def _tombstone_changed(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self._on_cancel(key)

    def _routing_changed(self, key: str, value: bytes | None) -> None:
        # A table that is deleted or unreadable leaves the last one in force.
        if key != subjects.ROUTING_KEY or value is None:
            return
        try:
            self._table = codec.decode_table(value)
        except codec.DecodeError as error:
            log.error("routing_table_undecodable", reason=str(error))
            return
        self._on_table()

    def _registry_changed(self, key: str, value: bytes | None) -> None:
        if key.startswith(_WORKER_PREFIX):
            self._worker_changed(key, value)
            return
        if not key.startswith(_INGRESS_PREFIX):
            return
        ingress_id = key.removeprefix(_INGRESS_PREFIX)
        if value is None:
            self._watch.lost(ingress_id, self._clock.monotonic_s())
        else:
            self._watch.seen(ingress_id)

    def _worker_changed(self, key: str, value: bytes | None) -> None:
        try:
            worker = codec.decode_registry_entry(value) if value is not None else None
        except codec.DecodeError:
            # Of another release, perhaps: then it is not preferred for anything.
            worker = None
        if isinstance(worker, WorkerInfo):
            self._workers[key] = worker
        else:
            self._workers.pop(key, None)

    async def _reconnected(self) -> None:
        self._watch.start_again(self._clock.monotonic_s())
