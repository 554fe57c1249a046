"""The conformance suite over the connectors that need no server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from fleet_common.errors import StoreFullError
from fleet_common.tensors.arena import ArenaConnector
from fleet_common.tensors.memory import MemoryConnector
from fleet_common.testing.clock import ManualClock
from fleet_common.testing.tensor_conformance import ConnectorConformance, ConnectorRig
from fleet_common.testing.tensors import arena_config


class TestMemory(ConnectorConformance):
    @pytest.fixture
    async def rig(self) -> ConnectorRig:
        clock = ManualClock()
        connector = MemoryConnector(clock, capacity_bytes=8 << 20)

        async def lose_all() -> None:
            connector.clear()

        async def fill() -> None:
            await connector.put(np.zeros(7 << 20, np.uint8), ttl_s=60)

        return ConnectorRig(connector, clock.advance, lose_all, fill)


class TestArena(ConnectorConformance):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[ConnectorRig]:
        clock = ManualClock()
        connector = ArenaConnector(arena_config(tmp_path, quota_bytes=12 << 20), clock)

        async def lose_all() -> None:
            await connector.close()

        async def fill() -> None:
            with pytest.raises(StoreFullError):
                for _ in range(100):
                    await connector.put(np.zeros(1 << 20, np.uint8), ttl_s=60)

        yield ConnectorRig(connector, clock.advance, lose_all, fill)
        await connector.close()
