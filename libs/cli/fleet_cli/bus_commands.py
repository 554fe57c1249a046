"""`fleet bus ...`: what the broker must hold, its configuration, its passwords."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from fleet_cli.errors import CliError
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, render
from fleet_contracts.control import FleetSpec

_PASSWORD_BYTES = 24


def read_spec(path: Path) -> FleetSpec:
    """A declared fleet from a YAML or JSON file. Raises CliError with what is wrong in it."""
    try:
        content = path.read_bytes()
    except OSError as err:
        raise CliError(f"{path} cannot be read: {err.strerror}") from err
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(content, type=FleetSpec)
        return msgspec.yaml.decode(content, type=FleetSpec)
    except (msgspec.DecodeError, msgspec.ValidationError) as err:
        raise CliError(f"{path} is no fleet: {err}") from err


def variable(role: Role, *, is_control: bool) -> str:
    """Environment variable that carries a user's password: `FLEET_WORKER_CONTROL_PASSWORD`."""
    return f"FLEET_{role.value.upper()}_{'CONTROL_' if is_control else ''}PASSWORD"


def secret_lines() -> list[str]:
    """New random passwords as lines of an env file."""
    names = [variable(role, is_control=is_control) for role in Role for is_control in (False, True)]
    # The broker reads a variable's value like its configuration: a letter first, or it may be taken for a number.
    return [f"{name}=k{secrets.token_hex(_PASSWORD_BYTES)}" for name in (*names, "FLEET_STORE_PASSWORD")]


def config_with_variables(port: int, store_dir: Path) -> str:
    """nats.conf whose passwords are variables of the server's environment."""
    work = {role: f"${variable(role, is_control=False)}" for role in Role}
    control = {role: f"${variable(role, is_control=True)}" for role in Role}
    options = ServerOptions(port=port, store_dir=store_dir, host="0.0.0.0", monitor_port=8222)
    text = render(options, Passwords(work=work, control=control))
    # A quoted variable is a literal to the server.
    for name in (*work.values(), *control.values()):
        text = text.replace(f'"{name}"', name)
    return text
