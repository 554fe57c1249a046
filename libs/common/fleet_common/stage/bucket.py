"""A bucket that is looked up once."""

from __future__ import annotations

from fleet_common.bus.port import Bus, KeyValue


class LazyBucket:
    """Opens a bucket at its first use and keeps it: looking it up costs a round trip."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._bucket: KeyValue | None = None

    async def open(self) -> KeyValue:
        """The bucket. Raises BusError."""
        if self._bucket is None:
            self._bucket = await self._bus.kv(self._name)
        return self._bucket
