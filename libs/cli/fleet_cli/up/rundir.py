"""The run folder of a stack: lock, secrets, configuration, what runs; and what a dead stack left behind."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet_cli.errors import CliError
from fleet_cli.up.leftovers import Identity, end_processes, remove_segments
from fleet_cli.up.spec import ROLES, Secrets
from fleet_common.bus.topology import durable_streams

#: The declared fleet of the stack, as `fleet bus apply` reads it.
SPEC_NAME = "fleet.json"

_PASSWORD_BYTES = 24


class RunDir:
    """Files of one stack, all of them 0600 in a folder of mode 0700."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @property
    def namespace(self) -> str:
        """Prefix of the stack's shared-memory segments: no two run folders share one."""
        return f"omnifleet-{hashlib.sha256(str(self.path).encode()).hexdigest()[:12]}"

    @property
    def stack_path(self) -> Path:
        return self.path / "stack.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def socket_dir(self) -> Path:
        """For what needs a short path: a Unix socket's may have 80 characters."""
        return Path(tempfile.gettempdir()) / self.namespace

    def make_socket_dir(self) -> Path:
        """A new, empty one, ours alone."""
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        self.socket_dir.mkdir(mode=0o700)
        return self.socket_dir

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; the kernel gives it back whatever happens to this process.

        Raises:
            CliError: another `fleet up` has it, or it cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            reason = err.strerror or str(err)
            raise CliError(f"{self.path} cannot be used ({reason}): choose another folder with FLEET_RUN_DIR") from err
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(descriptor)
            raise CliError(
                f"a fleet runs in {self.path} already: stop it, or choose another folder with FLEET_RUN_DIR"
            ) from err
        try:
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> Path:
        """Write a file of mode 0600, whole or not at all."""
        path = self.path / name
        fresh = path.with_suffix(f"{path.suffix}.new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        fresh.replace(path)
        return path

    def make_secrets(self) -> Secrets:
        """New random passwords."""
        users = [user for role in ROLES for user in (role, f"{role}_control")]
        made = Secrets(
            bus={user: secrets.token_urlsafe(_PASSWORD_BYTES) for user in users},
            store=secrets.token_urlsafe(_PASSWORD_BYTES),
        )
        self.write("secrets.json", json.dumps({"bus": dict(made.bus), "store": made.store}))
        return made

    def read_stack(self) -> dict[str, Any]:
        """`stack.json` of the stack that runs here. Raises CliError when none does."""
        try:
            stack: dict[str, Any] = json.loads(self.stack_path.read_text())
        except FileNotFoundError as err:
            raise CliError(f"no fleet runs in {self.path}: start one with `fleet up`") from err
        return stack

    def read_secrets(self) -> Secrets:
        """Passwords of the stack that runs here. Raises CliError when there are none."""
        try:
            stored = json.loads((self.path / "secrets.json").read_text())
        except FileNotFoundError as err:
            raise CliError(f"no fleet runs in {self.path}: start one with `fleet up`") from err
        return Secrets(bus=stored["bus"], store=stored["store"])

    def clean(self) -> list[str]:
        """Remove what a stack that did not end well left: processes, shared memory, broker files.

        Only under the lock. Returns one line per thing removed.
        """
        ended = end_processes(self.namespace, self._recorded())
        removed = [f"stopped leftover process {pid}" for pid in ended]
        removed += [f"removed shared memory {segment}" for segment in remove_segments(self.namespace)]
        # Work of clients that are gone, and the table of a fleet that may have been another one: only files and jobs
        # are kept, which are there to outlive a stack.
        for stream in (self.path / "jetstream").glob("jetstream/*/streams/*"):
            if stream.name not in durable_streams():
                shutil.rmtree(stream, ignore_errors=True)
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        self.stack_path.unlink(missing_ok=True)
        return removed

    def _recorded(self) -> list[Identity]:
        """Processes the last stack wrote down."""
        try:
            entries = json.loads(self.stack_path.read_text())["processes"].values()
            return [Identity(entry["pid"], entry["start_ticks"]) for entry in entries if entry["pid"]]
        except (FileNotFoundError, ValueError, KeyError):
            return []
