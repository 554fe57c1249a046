"""The bucket of models: what operators want served, and what became of it."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleet_common.bus.port import Bus, KeyValue, KvMirror
from fleet_contracts import codec, subjects
from fleet_contracts.models import ModelSpec, ModelState, ModelStatus

log = structlog.get_logger(__name__)

#: How long the records of a model that is gone are kept: a placement that takes over meanwhile learns of it.
GONE_S = 900.0


class ModelRecords:
    """Both records of every model, followed.

    Args:
        on_spec: told of every change of what is wanted.
    """

    def __init__(self, bus: Bus, on_spec: Callable[[ModelSpec], None] = lambda wanted: None) -> None:
        self._bus = bus
        self._on_spec = on_spec
        self._bucket: KeyValue | None = None
        self._mirror: KvMirror | None = None
        self._specs: dict[str, ModelSpec] = {}
        self._statuses: dict[str, ModelStatus] = {}

    async def start(self) -> None:
        """Read the bucket and follow it. Raises BusError."""
        self._bucket = await self._bus.kv(subjects.BUCKET_MODELS)
        self._mirror = await self._bucket.mirror(self._changed)

    async def stop(self) -> None:
        """Follow no more."""
        if self._mirror is not None:
            await self._mirror.stop()

    def spec(self, model: str) -> ModelSpec | None:
        """What is wanted of a model, None when nobody ever asked for it."""
        return self._specs.get(subjects.model_spec_key(model))

    def status(self, model: str) -> ModelStatus | None:
        """What became of the latest command about a model, None while nobody took it up."""
        wanted, status = self.spec(model), self._statuses.get(subjects.model_status_key(model))
        return status if wanted is None or status is None or status.generation >= wanted.generation else None

    def specs(self) -> list[ModelSpec]:
        """All that is wanted, by name of the model."""
        return sorted(self._specs.values(), key=lambda wanted: wanted.model)

    async def want(self, wanted: ModelSpec) -> None:
        """Say what is wanted. Raises BusError."""
        await self._opened().put(subjects.model_spec_key(wanted.model), codec.encode(wanted))

    async def tell(self, status: ModelStatus) -> None:
        """Say what became of it. Raises BusError."""
        is_gone = status.state is ModelState.GONE
        await self._opened().put(
            subjects.model_status_key(status.model), codec.encode(status), GONE_S if is_gone else None
        )

    async def forget(self, wanted: ModelSpec) -> None:
        """Let the record of a model that is gone expire, unless somebody wants it again. Raises BusError."""
        key = subjects.model_spec_key(wanted.model)
        entry = await self._opened().get(key)
        if entry is not None and entry.value == codec.encode(wanted):
            await self._opened().update(key, entry.value, entry.revision, GONE_S)

    def _opened(self) -> KeyValue:
        if self._bucket is None:
            raise RuntimeError("the records were not started")
        return self._bucket

    def _changed(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._specs.pop(key, None)
            self._statuses.pop(key, None)
            return
        try:
            record = codec.decode_model_record(value)
        except codec.DecodeError as err:
            log.warning("model_record_undecodable", key=key, error=str(err))
            return
        if isinstance(record, ModelStatus):
            self._statuses[key] = record
        else:
            self._specs[key] = record
            self._on_spec(record)
