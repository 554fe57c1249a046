"""The ingress's view of the fleet: mirrors of routing table, registry and records of models, as one `Catalog`."""

from __future__ import annotations

import structlog

from fleet_common.bus.port import Bus, KvMirror
from fleet_contracts import codec, subjects
from fleet_contracts.control import WorkerInfo
from fleet_ingress.core.catalog import Catalog

log = structlog.get_logger(__name__)

_WORKER_PREFIX = "worker."


class FleetView:
    """Follows the control plane; `catalog` is always the newest snapshot."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._mirrors: list[KvMirror] = []
        self._models: dict[str, str] = {}
        self.catalog = Catalog()

    async def start(self) -> None:
        """Read the buckets and follow them. Raises BusError."""
        routing = await self._bus.kv(subjects.BUCKET_ROUTING)
        registry = await self._bus.kv(subjects.BUCKET_REGISTRY)
        models = await self._bus.kv(subjects.BUCKET_MODELS)
        self._mirrors = [
            await models.mirror(self._on_models),
            await routing.mirror(self._on_routing),
            await registry.mirror(self._on_registry),
        ]

    async def stop(self) -> None:
        """Follow no more."""
        for mirror in self._mirrors:
            await mirror.stop()

    def _on_routing(self, key: str, value: bytes | None) -> None:
        # A table that is gone is no reason to forget it: the last one stays in force.
        if key != subjects.ROUTING_KEY or value is None:
            return
        try:
            self.catalog = self.catalog.with_table(codec.decode_table(value))
        except codec.DecodeError:
            log.warning("routing_table_undecodable", num_bytes=len(value))

    def _on_models(self, key: str, value: bytes | None) -> None:
        if value is None:
            # Both records of a model that is gone expire together.
            model = self._models.pop(key, None)
            if model is not None:
                self.catalog = self.catalog.without_model(model)
            return
        try:
            record = codec.decode_model_record(value)
        except codec.DecodeError:
            log.warning("model_record_undecodable", key=key)
            return
        self._models[key] = record.model
        self.catalog = self.catalog.with_record(record)

    def _on_registry(self, key: str, value: bytes | None) -> None:
        if not key.startswith(_WORKER_PREFIX):
            return
        try:
            entry = codec.decode_registry_entry(value) if value is not None else None
        except codec.DecodeError:
            log.warning("registry_entry_undecodable", key=key)
            return
        worker = entry if isinstance(entry, WorkerInfo) else None
        if self.catalog.workers.get(key) != worker:
            self.catalog = self.catalog.with_worker(key, worker)
