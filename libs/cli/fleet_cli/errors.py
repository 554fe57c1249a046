"""What the command line tells a person instead of a traceback."""

from __future__ import annotations


class CliError(Exception):
    """Printed as one line; the command ends with status 1."""
