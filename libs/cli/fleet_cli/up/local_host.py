"""This machine as the keeper of models sees it: where a model lies, its queues, its processes, its adapters."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from fleet_cli.errors import CliError
from fleet_cli.up import adapters, model, ports, spec
from fleet_cli.up.children import POLL_S, Children
from fleet_cli.up.leftovers import MARK, end_group, remove_segments_of
from fleet_cli.up.progress import Progress
from fleet_cli.up.rundir import SPEC_NAME, RunDir
from fleet_cli.up.settings import UpSettings, inherited
from fleet_cli.up.spec import Place, Secrets, ServedModel
from fleet_common.bus.apply import apply
from fleet_common.bus.port import Bus, BusAdmin
from fleet_common.errors import BusError
from fleet_common.settings import BusSettings
from fleet_contracts import codec, subjects
from fleet_contracts.control import RoutingTable
from fleet_contracts.models import AdapterSpec, ModelSpec

_APPLY_TIMEOUT_S = 20.0

#: Workers of a model that is taken off drain within `FLEET_RUNNER__DRAIN_S`, then have this long.
_STOP_S = 8.0


def is_routed(table: RoutingTable | None, served: ServedModel) -> bool:
    """Whether every stage of a model has a worker that gets work."""
    routes = [table.route(stage, served.name) for stage in served.replicas] if table is not None else [None]
    return all(
        route is not None and any(share.share_ratio > 0.0 for pool in route.pools for share in pool.workers)
        for route in routes
    )


class ControlBus(Bus, BusAdmin, Protocol):
    """What the host needs of its connection."""


class LocalHost:
    """Everything a stack has on this machine. See `fleet_cli.up.keeper.ModelHost`.

    Attributes:
        place: where the stack lives; it has more ports with each model.
        children: its processes.
        models: those whose processes run, by name.
    """

    def __init__(
        self,
        settings: UpSettings,
        run_dir: RunDir,
        progress: Progress,
        variables: Mapping[str, str],
        children: Children,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._progress = progress
        self._variables = variables
        self._first = model.shown_name(model.sources(settings.chat_model)[0])
        self._topology = asyncio.Lock()
        self._preparing = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._bus: ControlBus | None = None
        self.secrets: Secrets = run_dir.make_secrets()
        self.children = children
        self.models: dict[str, ServedModel] = {}
        self.place = Place(run_dir.path, sys.executable, run_dir.namespace, {}, settings.connector)

    def attach(self, tasks: asyncio.TaskGroup, bus: ControlBus) -> None:
        """Processes of models are tasks of this group; this bus tells what waits."""
        self._tasks, self._bus = tasks, bus

    def add_ports(self, names: Iterable[str]) -> None:
        """A port for every name that has none; ports once given stay."""
        fresh = ports.free_ports(name for name in names if name not in self.place.ports)
        self.place = dataclasses.replace(self.place, ports={**self.place.ports, **fresh})

    def bus_settings(self) -> BusSettings:
        """In the role `admin`."""
        return BusSettings(
            url=self.place.bus_url,
            user="admin",
            work_password=self.secrets.bus["admin"],  # type: ignore[arg-type]
            control_password=self.secrets.bus["admin_control"],  # type: ignore[arg-type]
        )  # type: ignore[call-arg]

    async def apply_topology(self) -> None:
        """Streams, consumers and buckets of all models, as `fleet bus apply` makes them. Raises CliError."""
        declared = spec.fleet_spec(self.models.values())
        self._run_dir.write(SPEC_NAME, msgspec.json.format(msgspec.json.encode(declared)).decode())
        deadline_s = time.monotonic() + _APPLY_TIMEOUT_S
        while True:
            try:
                await apply(self.bus_settings(), declared)
            except BusError as err:
                if time.monotonic() > deadline_s:
                    raise CliError(f"the broker could not be set up: {err}") from err
                await asyncio.sleep(POLL_S)
            else:
                return

    async def find(self, wanted: ModelSpec) -> ServedModel:
        """The model of a record; a local one is prepared first. Raises CliError when there is none."""
        group = "" if wanted.model == self._first else spec.group_name(wanted.model)
        if self._settings.engine == "scripted":
            found = model.scripted_model(self._settings, wanted.source, group)
        else:
            async with self._preparing:
                prepared = await self._prepare(wanted.source) if model.is_local_name(wanted.source) else None
            found = model.named_model(self._settings, wanted.source, prepared, group)
        return model.adapted(found, wanted)

    async def start(self, served: ServedModel) -> None:
        """Declare its queues, then start its processes. Raises CliError; then nothing was started."""
        assert self._tasks is not None
        async with self._topology:
            self.add_ports(served.all_workers())
            workers = spec.worker_specs(self._settings, served, self.place, self.secrets, self._variables)
            self.models[served.name] = served
            try:
                await self.apply_topology()
            except BaseException:
                del self.models[served.name]
                raise
        adapters.make_folder(self.place.adapters_dir(served))
        for worker in workers:
            self.children.launch(self._tasks, worker)

    async def until_ready(self, served: ServedModel) -> None:
        """Wait until every worker works and gets work. Raises CliError when one does not start."""
        assert self._bus is not None
        await self.children.until_ready(served.all_workers())
        # Ingresses see the table in the moment it is written: whoever is told `ready` can ask.
        while not is_routed(await self._table(), served):
            self.children.check(served.all_workers())
            await asyncio.sleep(POLL_S / 2)

    async def _table(self) -> RoutingTable | None:
        assert self._bus is not None
        try:
            entry = await (await self._bus.kv(subjects.BUCKET_ROUTING)).get(subjects.ROUTING_KEY)
            return codec.decode_table(entry.value) if entry is not None else None
        except (BusError, codec.DecodeError):
            return None

    def waits_for(self, served: ServedModel) -> str:
        """What is missing until then, for people."""
        return self.children.waits_for(served.all_workers())

    async def is_idle(self, served: ServedModel) -> bool:
        """Whether its queues hold nothing. Raises BusError."""
        assert self._bus is not None
        own = {(stage, served.pool(stage)) for stage in served.replicas}
        backlogs = await self._bus.pool_pending()
        return not any(b.num_pending + b.num_ack_pending for b in backlogs if (b.stage, b.pool) in own)

    async def stop(self, served: ServedModel) -> None:
        """End its processes; then their queues, adapters and shared memory go."""
        await self.children.remove(served.all_workers(), _STOP_S)
        for worker in served.all_workers():
            remove_segments_of(self._run_dir.namespace, worker)
        adapters.remove_folder(self.place.adapters_dir(served))
        async with self._topology:
            self.models.pop(served.name, None)
            try:
                await self.apply_topology()
            except CliError as err:
                self._progress.line(f"queues of {served.name} are left until the next change of a model: {err}")

    def set_adapters(self, served: ServedModel, wanted: Sequence[AdapterSpec]) -> Mapping[str, str]:
        """Put these adapters before its decode workers. Returns name -> why not, for those that cannot be used."""
        return adapters.set_links(self.place.adapters_dir(served), wanted, served.max_adapter_rank)

    async def _prepare(self, name: str) -> Path:
        """Run `fleet models prepare` aside: it imports model libraries when there is something to do."""
        cache = self._settings.model_cache.expanduser()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fleet_cli", "models", "prepare", name, "--cache", str(cache),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**inherited(self._variables), MARK: self._run_dir.namespace},
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        last = ""
        try:
            async for raw in process.stdout:
                last = raw.decode(errors="replace").rstrip()
                if last != str(cache / name):
                    self._progress.line(last)
            code = await process.wait()
        finally:
            end_group(process.pid)
        if code != 0:
            raise CliError(f"the model {name} could not be prepared: {last}")
        return cache / name
