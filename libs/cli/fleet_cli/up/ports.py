"""Loopback ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from fleet_cli.errors import CliError


def free_ports(names: Iterable[str]) -> dict[str, int]:
    """A free loopback port for each name, all different."""
    with contextlib.ExitStack() as held:
        ports: dict[str, int] = {}
        for name in names:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports[name] = probe.getsockname()[1]
        return ports


def check_free(host: str, port: int) -> None:
    """Raise CliError when somebody listens there already, or may not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            raise CliError(
                f"port {port} on {host} cannot be used ({err.strerror}): choose another with FLEET_HTTP_PORT"
            ) from err
