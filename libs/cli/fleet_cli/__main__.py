"""`python -m fleet_cli` and `fleet`."""

from __future__ import annotations

import sys

import pydantic

from fleet_cli.app import app
from fleet_cli.errors import CliError
from fleet_common.errors import FleetError
from fleet_common.server_binaries import ServerMissingError


def main() -> None:
    """Run a command; what a person can do something about is one line, not a traceback."""
    try:
        app()
    except (CliError, FleetError, ServerMissingError) as err:
        sys.exit(f"fleet: {err}")
    except pydantic.ValidationError as err:
        sys.exit(f"fleet: {settings_fault(err)}")


def settings_fault(err: pydantic.ValidationError) -> str:
    """Settings that are wrong, as they are written in the environment."""
    # Without the values: one may be a password.
    return "; ".join(f"FLEET_{'__'.join(map(str, fault['loc'])).upper()}: {fault['msg']}" for fault in err.errors())


if __name__ == "__main__":
    main()
