"""The network store of a local fleet, one of several: its servers, and what services must be told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet_common.store_servers import (
    mooncake_master_command,
    mooncake_node_command,
    yuanrong_command,
    yuanrong_environment,
    yuanrong_ready_path,
)

#: Memory of the store, whichever it is.
_MEMORY_MB = 512

REDIS, MOONCAKE, YUANRONG = "redis", "mooncake", "yuanrong"

#: Names that need a port, by connector: first the server that clients talk to.
STORE_PORTS: Mapping[str, tuple[str, ...]] = {
    REDIS: ("valkey-server",),
    MOONCAKE: ("mooncake-master", "mooncake-node", "mooncake-metrics"),
    YUANRONG: ("yuanrong-worker", "yuanrong-metastore"),
}


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the store lives.

    Attributes:
        binaries: by process name.
        socket_dir: a folder with a short path: a Unix socket's may have 80 characters.
    """

    ports: Mapping[str, int]
    binaries: Mapping[str, Path]
    run_dir: Path
    socket_dir: Path


def store_environment(connector: str, ports: Mapping[str, int], password: str, logs: Path) -> dict[str, str]:
    """What services are told: this store takes the writes, and it is the only one."""
    address = f"127.0.0.1:{ports[STORE_PORTS[connector][0]]}"
    if connector == MOONCAKE:
        told = {"FLEET_STORE__MOONCAKE__MASTER_ADDRESS": address}
    elif connector == YUANRONG:
        # The client library writes a log of its own.
        told = {"FLEET_STORE__YUANRONG__WORKER_ADDRESS": address, "DATASYSTEM_CLIENT_LOG_DIR": str(logs)}
    else:
        told = {"FLEET_STORE__REDIS_URL": f"redis://:{password}@{address}/0"}
    return {"FLEET_STORE__NETWORK": connector, **told}


@dataclass(frozen=True, slots=True)
class StoreServer:
    """One server process.

    Attributes:
        environment: on top of what every process gets.
        ready_path: exists once it can work; None: it can when it listens.
        needs: servers that must be ready before it is started.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: Path | None = None
    needs: tuple[str, ...] = ()


def store_servers(connector: str, place: StorePlace) -> tuple[StoreServer, ...]:
    """The processes of a store, in the order in which they are started."""
    ports, binaries = place.ports, place.binaries
    if connector == MOONCAKE:
        master, node = "mooncake-master", "mooncake-node"
        return (
            StoreServer(master, mooncake_master_command(binaries[master], ports[master], ports["mooncake-metrics"])),
            StoreServer(
                node,
                mooncake_node_command(binaries[node], ports[node], ports[master], _MEMORY_MB),
                needs=(master,),
            ),
        )
    if connector == YUANRONG:
        worker = "yuanrong-worker"
        return (
            StoreServer(
                worker,
                yuanrong_command(
                    binaries[worker], (ports[worker], ports["yuanrong-metastore"]), place.socket_dir, _MEMORY_MB
                ),
                environment=yuanrong_environment(binaries[worker]),
                ready_path=yuanrong_ready_path(place.socket_dir),
            ),
        )
    server = "valkey-server"
    return (StoreServer(server, (str(binaries[server]), str(place.run_dir / "valkey.conf"))),)
