"""The other end of a hop: `python -m loadtests.bench.connector_reader SETTINGS-OF-THE-STORE-AS-JSON`.

Opens every tensor whose reference comes as a line of hex, and answers `ok`.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from fleet_common.settings import StoreSettings
from fleet_common.tensors.factory import open_store
from fleet_contracts.tensors import TensorRef


async def _serve() -> None:
    store = await open_store(StoreSettings.model_validate_json(sys.argv[1]))
    for line in sys.stdin:
        ref = msgspec.msgpack.decode(bytes.fromhex(line), type=TensorRef)
        with await store.get(ref):
            sys.stdout.write("ok\n")
        sys.stdout.flush()
    await store.close()


if __name__ == "__main__":
    asyncio.run(_serve())
