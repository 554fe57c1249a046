"""Makes a process's tensor store from settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleet_common.clock import Clock, SystemClock
from fleet_common.errors import StoreError
from fleet_common.settings import StoreSettings
from fleet_common.tensors.arena import ArenaConfig, ArenaConnector, owner_token, read_boot_id
from fleet_common.tensors.framing import Compression
from fleet_common.tensors.inline import InlineConnector
from fleet_common.tensors.memory import MemoryConnector
from fleet_common.tensors.mooncake import MooncakeConnector, MooncakeOptions
from fleet_common.tensors.port import Connector
from fleet_common.tensors.redis import RedisConnector, RedisOptions
from fleet_common.tensors.router import Connectors, FleetTensorStore, SpillCall
from fleet_common.tensors.yuanrong import YuanrongConnector, YuanrongOptions

#: Makes a network connector; None when the settings do not ask for it.
ConnectorFactory = Callable[[StoreSettings, Clock], Connector | None]


def redis_connector(settings: StoreSettings, clock: Clock) -> Connector | None:
    """Redis, when it has an address."""
    if settings.redis_url is None:
        return None
    options = RedisOptions(
        url=settings.redis_url.get_secret_value(),
        compression=Compression(settings.redis_compression),
        timeout_s=settings.redis_timeout_s,
    )
    return RedisConnector(options, clock)


def mooncake_connector(settings: StoreSettings, clock: Clock) -> Connector | None:
    """Mooncake, when its master has an address. Raises StoreError when its library is not installed."""
    chosen = settings.mooncake
    if not chosen.master_address:
        return None
    options = MooncakeOptions(
        master_address=chosen.master_address,
        host=chosen.host,
        transport=chosen.transport,
        devices=chosen.devices,
        segment_bytes=chosen.segment_bytes,
        compression=Compression(chosen.compression),
        timeout_s=chosen.timeout_s,
    )
    return MooncakeConnector(options, clock)


def yuanrong_connector(settings: StoreSettings, clock: Clock) -> Connector | None:
    """openYuanrong, when its worker has an address. Raises StoreError when its library is not installed."""
    chosen = settings.yuanrong
    if not chosen.worker_address:
        return None
    options = YuanrongOptions(
        worker_address=chosen.worker_address,
        compression=Compression(chosen.compression),
        timeout_s=chosen.timeout_s,
    )
    return YuanrongConnector(options, clock)


#: Network connectors by the name in `NetworkPlace.connector`. All that have an address are read from; `network` of the
#: settings, else the first, takes the writes.
NETWORK_CONNECTORS: Mapping[str, ConnectorFactory] = {
    "redis": redis_connector,
    "mooncake": mooncake_connector,
    "yuanrong": yuanrong_connector,
}


async def open_store(
    settings: StoreSettings,
    *,
    owner: str = "",
    spill: SpillCall | None = None,
    clock: Clock | None = None,
    boot_id: str | None = None,
    network: Mapping[str, ConnectorFactory] = NETWORK_CONNECTORS,
) -> FleetTensorStore:
    """Open the store and sweep what dead processes left in the arena's folder.

    Args:
        owner: stable name of this process (its worker id): leftovers of its last run are removed at once, whatever
            they hold. "" = none.
        spill: how to ask the owner of an arena that this process cannot map, see `spill.bus_spill`.
        boot_id: this host's unless told otherwise.
    Raises:
        StoreError: a network store is asked for that has no address, or whose library is not installed.
    """
    clock = clock or SystemClock()
    boot_id = boot_id or read_boot_id()
    arena = _open_arena(settings, owner, boot_id, clock)
    connectors = Connectors(inline=InlineConnector(clock), arena=arena, network=_network(settings, clock, network))
    if arena is not None:
        now_unix_s = clock.unix_s()
        await arena.reap(now_unix_s)
        if owner:
            await arena.reap(now_unix_s, own=True)
    return FleetTensorStore(
        connectors,
        clock,
        locality=settings.locality or boot_id,
        inline_bytes=settings.shm_threshold_bytes,
        spill=spill,
    )


def memory_store(
    clock: Clock | None = None, *, capacity_bytes: int = 0, locality: str = "memory", inline_bytes: int = 1024
) -> FleetTensorStore:
    """A store within this process: unit tests."""
    clock = clock or SystemClock()
    connectors = Connectors(
        inline=InlineConnector(clock),
        arena=None,
        network={MemoryConnector.name: MemoryConnector(clock, capacity_bytes)},
    )
    return FleetTensorStore(connectors, clock, locality=locality, inline_bytes=inline_bytes)


def _network(settings: StoreSettings, clock: Clock, factories: Mapping[str, ConnectorFactory]) -> dict[str, Connector]:
    """The connectors that have an address, the one that takes the writes first."""
    names = sorted(factories, key=lambda name: name != settings.network)
    made = {name: connector for name in names if (connector := factories[name](settings, clock)) is not None}
    if settings.network and settings.network not in made:
        known = ", ".join(factories)
        raise StoreError(f"the network store {settings.network!r} has no address, or is none of: {known}")
    return made


def _open_arena(settings: StoreSettings, owner: str, boot_id: str, clock: Clock) -> ArenaConnector | None:
    if settings.arena_dir is None or settings.arena_bytes == 0:
        return None
    config = ArenaConfig(
        folder=settings.arena_dir,
        namespace=settings.arena_namespace,
        owner=owner_token(owner),
        boot_id=boot_id,
        quota_bytes=settings.arena_bytes,
        grace_s=settings.reaper_grace_s,
    )
    return ArenaConnector(config, clock)
