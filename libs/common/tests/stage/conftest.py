from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fleet_common.testing.rig import Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    await rig.stop()
