"""Real servers for tests: broker and network stores on free loopback ports, from the binaries that packages ship.

A missing binary raises: a suite that skips is not green.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_common.server_binaries import (
    ServerMissingError,
    mooncake_master_binary,
    mooncake_node_binary,
    nats_server_binary,
    server_binary,
    valkey_server_binary,
    yuanrong_worker_binary,
)
from fleet_common.store_servers import (
    mooncake_master_command,
    mooncake_node_command,
    yuanrong_command,
    yuanrong_environment,
    yuanrong_ready_path,
)

#: A Yuanrong worker takes 6 s on an idle machine.
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_ATTEMPTS = 3

__all__ = [
    "MooncakeServers",
    "NatsConfig",
    "ServerMissingError",
    "ServerProcess",
    "ServerStartError",
    "free_port",
    "mooncake_servers",
    "nats_server",
    "nats_server_binary",
    "server_binary",
    "valkey_server",
    "valkey_server_binary",
    "wait_until_stopped",
    "yuanrong_worker",
]

#: Makes the configuration text of a nats-server from its port and its JetStream folder.
NatsConfig = Callable[[int, Path], str]


def wait_until_stopped(pid: int) -> None:
    """Return once every thread of process `pid` has stopped (or it is gone): `kill` only asks for SIGSTOP, and a thread
    on the other core may still answer for a moment. At most 5 s."""
    give_up_s = time.monotonic() + _STOP_TIMEOUT_S
    while any(state not in "TtZX" for state in _thread_states(pid)) and time.monotonic() < give_up_s:
        time.sleep(0.001)


def _thread_states(pid: int) -> list[str]:
    """The one-letter state of each thread, as in proc(5)."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


class ServerStartError(RuntimeError):
    """The server ended, or did not listen in time."""


def free_port() -> int:
    """A loopback TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server that a test may kill and start again on the same port with the same data.

    Calls block until the process has ended or listens again; in async tests run them with `asyncio.to_thread`.

    Args:
        environment: the server's whole environment; None: ours.
        ready_path: a file that the server makes once it can work; None: it can when it listens.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        url: str,
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        ready_path: Path | None = None,
    ) -> None:
        self.port = port
        self.url = url
        self._command = list(command)
        self._log_path = log_path
        self._environment = environment
        self._ready_path = ready_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server. Raises ServerStartError when it is down."""
        if self._process is None:
            raise ServerStartError("the server is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server wrote."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def start(self) -> None:
        """Start and wait until it can work. Raises ServerStartError."""
        if self._ready_path is not None:
            self._ready_path.unlink(missing_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self._environment
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                self._process = None
                raise ServerStartError(f"{self._command[0]} ended at once:\n{self.log[-2000:]}")
            if self._listens() and (self._ready_path is None or self._ready_path.exists()):
                return
            time.sleep(0.02)
        self.kill()
        raise ServerStartError(f"{self._command[0]} does not listen on port {self.port}:\n{self.log[-2000:]}")

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL and reap. Nothing to do when it is down."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, SIGKILL after 5 s, and reap. Nothing to do when it is down."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Start again on the same port with the same data; kills it first when it still runs."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: the server hangs and its sockets stay open. Returns when every thread of it has stopped."""
        self._signal(signal.SIGSTOP)
        if self._process is not None:
            wait_until_stopped(self._process.pid)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)


@contextlib.contextmanager
def nats_server(config: NatsConfig | None = None, *, port: int | None = None) -> Iterator[ServerProcess]:
    """A nats-server with JetStream in a temporary folder.

    Args:
        config: makes the configuration text (see `fleet_common.bus.server_config`); None: no accounts, no passwords.
        port: a given port instead of a free one.
    """
    binary = str(nats_server_binary())

    def prepare(folder: Path, chosen_port: int) -> ServerProcess:
        store_dir = folder / "jetstream"
        command = [binary, "-a", "127.0.0.1", "-p", str(chosen_port), "-js", "-sd", str(store_dir)]
        if config is not None:
            config_path = folder / "nats.conf"
            config_path.write_text(config(chosen_port, store_dir))
            command = [binary, "-c", str(config_path)]
        return ServerProcess(command, chosen_port, f"nats://127.0.0.1:{chosen_port}", folder / "nats.log")

    with _running(prepare, port) as server:
        yield server


@contextlib.contextmanager
def valkey_server(*, password: str = "", port: int | None = None) -> Iterator[ServerProcess]:
    """A valkey-server without persistence: a restart comes back empty."""
    binary = str(valkey_server_binary())

    def prepare(folder: Path, chosen_port: int) -> ServerProcess:
        command = [binary, "--bind", "127.0.0.1", "--port", str(chosen_port), "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        if password:
            command += ["--requirepass", password]
        login = f":{password}@" if password else ""
        return ServerProcess(command, chosen_port, f"redis://{login}127.0.0.1:{chosen_port}/0", folder / "valkey.log")

    with _running(prepare, port) as server:
        yield server


@dataclass(frozen=True, slots=True)
class MooncakeServers:
    """A Mooncake store.

    Attributes:
        node: holds the bytes; restarted, it is empty.
    """

    master: ServerProcess
    node: ServerProcess

    @property
    def address(self) -> str:
        """Of the master, host:port."""
        return self.master.url


@contextlib.contextmanager
def mooncake_servers(*, memory_mb: int = 64) -> Iterator[MooncakeServers]:
    """A master and one storage node."""
    master_binary, node_binary = mooncake_master_binary(), mooncake_node_binary()

    def prepare_master(folder: Path, port: int) -> ServerProcess:
        command = mooncake_master_command(master_binary, port, free_port())
        return ServerProcess(command, port, f"127.0.0.1:{port}", folder / "master.log")

    with _running(prepare_master, None) as master:

        def prepare_node(folder: Path, port: int) -> ServerProcess:
            command = mooncake_node_command(node_binary, port, master.port, memory_mb)
            return ServerProcess(command, port, f"127.0.0.1:{port}", folder / "node.log")

        with _running(prepare_node, None) as node:
            yield MooncakeServers(master, node)


@contextlib.contextmanager
def yuanrong_worker(*, memory_mb: int = 64) -> Iterator[ServerProcess]:
    """A worker with its own metastore; its `url` is host:port."""
    binary = yuanrong_worker_binary()

    def prepare(folder: Path, port: int) -> ServerProcess:
        return ServerProcess(
            yuanrong_command(binary, (port, free_port()), folder, memory_mb),
            port,
            f"127.0.0.1:{port}",
            folder / "worker.log",
            environment=yuanrong_environment(binary),
            ready_path=yuanrong_ready_path(folder),
        )

    with _running(prepare, None) as server:
        yield server


@contextlib.contextmanager
def _running(prepare: Callable[[Path, int], ServerProcess], port: int | None) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="fleet-server-", ignore_cleanup_errors=True) as folder:
        server = _start(prepare, Path(folder), port)
        try:
            yield server
        finally:
            server.resume()
            server.stop()


def _start(prepare: Callable[[Path, int], ServerProcess], folder: Path, port: int | None) -> ServerProcess:
    for attempt in range(_ATTEMPTS):
        server = prepare(folder, port or free_port())
        try:
            server.start()
        except ServerStartError:
            # Somebody else may have taken the free port in between.
            if port is not None or attempt == _ATTEMPTS - 1:
                raise
        else:
            return server
    raise ServerStartError("unreachable")
