"""Starts a stack, keeps it running, and takes it down in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet_cli.errors import CliError
from fleet_cli.records import ModelRecords
from fleet_cli.up import example, model, spec, stores
from fleet_cli.up.children import POLL_S, Children
from fleet_cli.up.guardian import GOOD_BYE
from fleet_cli.up.keeper import ModelKeeper
from fleet_cli.up.leftovers import end_processes, remove_segments
from fleet_cli.up.local_host import LocalHost
from fleet_cli.up.progress import Progress
from fleet_cli.up.rundir import RunDir
from fleet_cli.up.settings import UpSettings, inherited
from fleet_cli.up.spec import ProcessSpec, ServedModel, StopRank
from fleet_cli.up.stores import StoreServer
from fleet_common.bus.nats import connect_bus
from fleet_common.bus.server_config import Passwords, Role, ServerOptions, render
from fleet_common.clock import SystemClock
from fleet_common.errors import BusError
from fleet_common.server_binaries import (
    ServerMissingError,
    mooncake_master_binary,
    mooncake_node_binary,
    nats_server_binary,
    valkey_server_binary,
    yuanrong_worker_binary,
)
from fleet_contracts.models import ModelSpec, ModelState

#: Where the servers of each connector are found.
_STORE_BINARIES: Mapping[str, Mapping[str, Callable[[], Path]]] = {
    stores.REDIS: {"valkey-server": valkey_server_binary},
    stores.MOONCAKE: {"mooncake-master": mooncake_master_binary, "mooncake-node": mooncake_node_binary},
    stores.YUANRONG: {"yuanrong-worker": yuanrong_worker_binary},
}

#: Part of the stop time after which each rank, and with it those before, has had its chance.
_STOP_PART = {StopRank.INGRESS: 0.5, StopRank.WORKER: 0.9, StopRank.PLACEMENT: 0.94, StopRank.SERVER: 0.98}


class Supervisor:
    """One stack, from start to end. Runs under the lock of its run folder."""

    def __init__(
        self,
        settings: UpSettings,
        run_dir: RunDir,
        progress: Progress,
        variables: Mapping[str, str],
        *,
        stops_with_stdin: bool = False,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._progress = progress
        self._variables = variables
        self._children = Children(run_dir, progress, self._write_stack)
        self._host = LocalHost(settings, run_dir, progress, variables, self._children)
        self._keeping = contextlib.AsyncExitStack()
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._picture_file: Path | None = None
        self._state = "starting"
        self._begun_s = time.monotonic()
        self._stops_with_stdin = stops_with_stdin

    async def run(self) -> None:
        """Start, run until a signal, stop. Raises CliError when the stack does not come up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        if self._stops_with_stdin:
            loop.add_reader(sys.stdin.fileno(), self._stdin_ended)
        guardian = await self._start_guardian()
        failure: CliError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._start_or_stop(tasks)
            except CliError as err:
                failure = err
            finally:
                await self._stop()
        end_processes(self._run_dir.namespace)
        remove_segments(self._run_dir.namespace)
        shutil.rmtree(self._run_dir.socket_dir, ignore_errors=True)
        self._run_dir.stack_path.unlink(missing_ok=True)
        await guardian.communicate(GOOD_BYE)
        if failure is not None:
            raise failure
        self._progress.line("stopped: nothing is left running")

    def _signalled(self) -> None:
        if self._stop_asked.is_set():
            self._hurry.set()
        self._stop_asked.set()

    def _stdin_ended(self) -> None:
        """Whoever started the stack is gone."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self._stop_asked.set()

    async def _start_guardian(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fleet_cli.up.guardian",
            str(self._run_dir.path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=inherited(self._variables),
            start_new_session=True,
        )

    async def _start_or_stop(self, tasks: asyncio.TaskGroup) -> None:
        """Start everything, unless told to stop before; then wait for the signal."""
        watching = tasks.create_task(self._children.watch(), name="watch")
        starting = tasks.create_task(self._guarded_start(tasks), name="start")
        stopping = tasks.create_task(self._stop_asked.wait(), name="stop")
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and (failure := starting.result()) is not None:
                raise failure
            await stopping
        finally:
            for task in (watching, starting, stopping):
                task.cancel()
            await asyncio.wait({watching, starting, stopping})
            self._progress.done()

    async def _guarded_start(self, tasks: asyncio.TaskGroup) -> CliError | None:
        """A failed start is a result: an exception would end the group before anything is stopped in order."""
        try:
            await self._start(tasks)
        except CliError as err:
            return err
        return None

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        self._host.add_ports(spec.server_ports(self._settings))
        # Before anything can be ready: whoever sees a stack that is finds what its lines name.
        name = model.shown_name(model.sources(self._settings.chat_model)[0])
        self._picture_file = self._run_dir.write("picture.json", example.picture_body(name))
        servers = self._server_specs()
        for server in servers:
            await self._children.until_ready(server.needs)
            self._children.launch(tasks, server)
        await self._children.until_ready(tuple(server.name for server in servers))
        await self._host.apply_topology()
        self._host.add_ports(spec.CONTROL)
        for process in spec.control_specs(self._settings, self._host.place, self._host.secrets, self._variables):
            self._children.launch(tasks, process)
        records = await self._keep_models(tasks)
        first = await self._serve_first(records)
        await self._children.until_ready(spec.CONTROL)
        self._announce(first)

    async def _keep_models(self, tasks: asyncio.TaskGroup) -> ModelRecords:
        """From here on `fleet serve` works. Raises CliError."""
        try:
            bus = await connect_bus(self._host.bus_settings(), "fleet up")
            self._keeping.push_async_callback(bus.close)
            self._host.attach(tasks, bus)
            # Both are there before the first record changes.
            records = ModelRecords(bus, lambda wanted: keeper.changed(wanted))
            keeper = ModelKeeper(records, self._host, SystemClock(), drain_s=self._settings.unserve_s)
            await records.start()
        except BusError as err:
            raise CliError(f"the records of models cannot be read: {err}") from err
        self._keeping.push_async_callback(records.stop)
        keeping = tasks.create_task(keeper.run(), name="models")
        self._keeping.callback(keeping.cancel)
        return records

    async def _serve_first(self, records: ModelRecords) -> ServedModel:
        """Ask for the models of the settings, as `fleet serve` does; returns the first. Raises CliError."""
        names = []
        embedding = self._settings.embedding_source
        audio, drawing = model.audio_sources(self._settings), model.drawing_sources(self._settings)
        others = (*([embedding] if embedding else []), *audio, *drawing)
        for source in dict.fromkeys((*model.sources(self._settings.chat_model), *others)):
            names.append(model.shown_name(source))
            room = self._settings.chat_lora
            try:
                await records.want(ModelSpec(model=names[-1], source=source, generation=1, takes_adapters=room))
            except BusError as err:
                raise CliError(f"the records of models cannot be written: {err}") from err
        while True:
            self._children.check(spec.CONTROL)
            found = {name: records.status(name) for name in names}
            failed = [status for status in found.values() if status and status.state is ModelState.FAILED]
            if failed:
                raise CliError(f"{failed[0].error}")
            if all(status and status.state is ModelState.READY for status in found.values()):
                return self._host.models[names[0]]
            await asyncio.sleep(POLL_S / 2)

    def _server_specs(self) -> tuple[ProcessSpec, ...]:
        passwords = Passwords(
            work={role: self._host.secrets.bus[role.value] for role in Role},
            control={role: self._host.secrets.bus[f"{role.value}_control"] for role in Role},
        )
        options = ServerOptions(
            port=self._host.place.ports["nats-server"],
            store_dir=self._run_dir.path / "jetstream",
            server_name="omnifleet",
        )
        self._run_dir.write("nats.conf", render(options, passwords))
        return spec.server_specs(self._host.place, nats_server_binary(), self._store_servers(), self._variables)

    def _store_servers(self) -> tuple[StoreServer, ...]:
        """Raises CliError when the package of the connector is not installed."""
        connector = self._host.place.connector
        if connector == stores.REDIS:
            self._run_dir.write("valkey.conf", spec.valkey_config(self._host.place, self._host.secrets.store))
        try:
            binaries = {name: find() for name, find in _STORE_BINARIES[connector].items()}
        except ServerMissingError as err:
            raise CliError(f"the connector {connector} cannot be started: {err}") from err
        socket_dir = self._run_dir.make_socket_dir()
        place = stores.StorePlace(self._host.place.ports, binaries, self._run_dir.path, socket_dir)
        return stores.store_servers(connector, place)

    def _write_stack(self) -> None:
        stack = {
            "url": f"http://{self._settings.http_host}:{self._settings.http_port}",
            "state": self._state,
            "engine": self._settings.engine,
            "model": model.shown_name(model.sources(self._settings.chat_model)[0]),
            "bus_url": self._host.place.bus_url,
            "connector": self._host.place.connector,
            "store_port": self._host.place.store_port,
            "namespace": self._run_dir.namespace,
            "processes": self._children.described(),
        }
        self._run_dir.write("stack.json", json.dumps(stack, indent=2))

    def _announce(self, first: ServedModel) -> None:
        picture_file = self._picture_file if first.takes_pictures else None
        self._state = "ready"
        self._write_stack()
        url = f"http://{self._settings.http_host}:{self._settings.http_port}"
        self._progress.done()
        self._progress.line(f"\nOmnifleet is ready after {time.monotonic() - self._begun_s:.0f} s: {url}\n")
        hearing, speaking = (
            model.served_name(source) for source in (self._settings.transcribe_model, self._settings.speech_model)
        )
        drawing = model.served_name(self._settings.image_model)
        lines = (
            *example.curl_lines(url, first.name, picture_file),
            *example.drawing_lines(url, drawing),
            *example.audio_lines(url, hearing, speaking),
        )
        for line in lines:
            self._progress.line(f"{line}\n")
        self._progress.line("Ctrl-C stops it.")

    async def _stop(self) -> None:
        """Ingress, workers, placement, servers: each rank gets its time, then everything left is killed."""
        self._state = "stopping"
        begun_s = time.monotonic()
        self._children.forbid_starts()
        # First, or it would take what is stopped now for a failed load.
        await self._keeping.aclose()
        for rank in StopRank:
            members = [child for child in self._children if child.spec.rank == rank and child.is_running]
            if not members:
                continue
            self._progress.line(f"stopping {', '.join(child.name for child in members)}")
            for child in members:
                child.signal(signal.SIGTERM)
            left_s = begun_s + self._settings.stop_s * _STOP_PART[rank] - time.monotonic()
            await self._children.wait_ended(members, max(0.1, left_s), self._hurry.is_set)
        await self._children.kill(list(self._children))
