"""Makes the models on this host what the records ask for, and reports what became of each.

One task per model: a load that takes minutes, or fails, holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fleet_cli.errors import CliError
from fleet_cli.records import ModelRecords
from fleet_cli.up.spec import ServedModel
from fleet_common.clock import Clock
from fleet_common.errors import BusError
from fleet_contracts.models import AdapterSpec, ModelSpec, ModelState, ModelStatus

_RETRY_S = 0.5
_POLL_S = 0.5

#: Looks at the queues of a model that must all find them empty: a step is published before the one before is acked,
#: but its queues are not looked at in one moment.
_IDLE_LOOKS = 3


class ModelHost(Protocol):
    """What the keeper needs of the machine whose processes it looks after."""

    async def find(self, wanted: ModelSpec) -> ServedModel:
        """What to start. Raises CliError when there is no such model here."""

    async def start(self, model: ServedModel) -> None:
        """Queues, then processes. Raises CliError; then nothing was started."""

    async def until_ready(self, model: ServedModel) -> None:
        """Wait until every worker works. Raises CliError when one does not start."""

    def waits_for(self, model: ServedModel) -> str:
        """What is missing until then, for people."""

    async def is_idle(self, model: ServedModel) -> bool:
        """Whether its queues hold nothing. Raises BusError."""

    async def stop(self, model: ServedModel) -> None:
        """End its processes, remove its queues and what they left."""

    def set_adapters(self, model: ServedModel, adapters: Sequence[AdapterSpec]) -> Mapping[str, str]:
        """Put these adapters before its workers. Returns name -> why not, for those that cannot be used."""


@dataclass(slots=True)
class _Tended:
    """A model somebody asked for.

    Attributes:
        running: what was started for it.
        told: its latest status.
    """

    wanted: ModelSpec
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    running: ServedModel | None = None
    told: ModelStatus | None = None


class ModelKeeper:
    """Follows the records.

    Args:
        drain_s: longest time for the requests of a model that is unserved.
    """

    def __init__(self, records: ModelRecords, host: ModelHost, clock: Clock, *, drain_s: float) -> None:
        self._records = records
        self._host = host
        self._clock = clock
        self._drain_s = drain_s
        self._tended: dict[str, _Tended] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Look after the models until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for wanted in self._records.specs():
                self.changed(wanted)
            await asyncio.Event().wait()

    def changed(self, wanted: ModelSpec) -> None:
        """What is wanted of a model is another thing now."""
        if self._group is None:
            return
        tended = self._tended.get(wanted.model)
        if tended is not None:
            if wanted != tended.wanted:
                tended.wanted = wanted
                tended.changed.set()
        elif wanted.is_wanted:
            self._tended[wanted.model] = tended = _Tended(wanted)
            self._group.create_task(self._tend(tended), name=f"model {wanted.model}")

    async def _tend(self, tended: _Tended) -> None:
        """Do what is wanted; drop it for what is wanted instead."""
        while True:
            tended.changed.clear()
            wanted = tended.wanted
            work = asyncio.create_task(self._load(tended, wanted) if wanted.is_wanted else self._retire(tended, wanted))
            change = asyncio.create_task(tended.changed.wait())
            try:
                await asyncio.wait({work, change}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                    if not wanted.is_wanted and not change.done():
                        del self._tended[wanted.model]
                        return
                    await change
            finally:
                for task in (work, change):
                    task.cancel()
                await asyncio.wait({work, change})

    async def _load(self, tended: _Tended, wanted: ModelSpec) -> None:
        """Start what is not running yet; a model that runs as wanted only gets its adapters."""
        try:
            model = await self._host.find(wanted)
            if tended.running is not None and tended.running != model:
                await self._end(tended)
            if tended.running is None:
                await self._tell(tended, wanted, ModelState.LOADING, waits_for="starting")
                await self._host.start(model)
                tended.running = model
            await self._until_ready(tended, wanted, model)
            errors = self._host.set_adapters(model, wanted.adapters)
        except (CliError, OSError) as err:
            await self._end(tended)
            await self._tell(tended, wanted, ModelState.FAILED, error=str(err))
            return
        usable = tuple(adapter.name for adapter in wanted.adapters if adapter.name not in errors)
        await self._tell(tended, wanted, ModelState.READY, adapters=usable, adapter_errors=dict(errors))

    async def _until_ready(self, tended: _Tended, wanted: ModelSpec, model: ServedModel) -> None:
        ready = asyncio.create_task(self._host.until_ready(model))
        is_new = tended.told is None or tended.told.state is not ModelState.READY
        try:
            while not (await asyncio.wait({ready}, timeout=_POLL_S))[0]:
                if is_new:
                    await self._tell(tended, wanted, ModelState.LOADING, waits_for=self._host.waits_for(model))
            ready.result()
        finally:
            ready.cancel()
            await asyncio.wait({ready})

    async def _retire(self, tended: _Tended, wanted: ModelSpec) -> None:
        """Ingresses refuse new requests as soon as they see what is wanted; those that run are waited for."""
        if tended.running is not None:
            await self._tell(tended, wanted, ModelState.DRAINING)
            await self._until_idle(tended.running)
            await self._end(tended)
        await self._tell(tended, wanted, ModelState.GONE)
        try:
            await self._records.forget(wanted)
        except BusError:
            # It stays: a model that is not wanted is not served either way.
            return

    async def _until_idle(self, model: ServedModel) -> None:
        until_s = self._clock.monotonic_s() + self._drain_s
        num_looks = 0
        while num_looks < _IDLE_LOOKS and self._clock.monotonic_s() < until_s:
            await self._clock.sleep(_POLL_S)
            try:
                num_looks = num_looks + 1 if await self._host.is_idle(model) else 0
            except BusError:
                num_looks = 0

    async def _end(self, tended: _Tended) -> None:
        if tended.running is not None:
            await self._host.stop(tended.running)
            tended.running = None

    async def _tell(self, tended: _Tended, wanted: ModelSpec, state: ModelState, **facts: Any) -> None:
        """Write a status that says something new; waits for the broker as long as it takes."""
        status = ModelStatus(
            model=wanted.model, generation=wanted.generation, state=state, since_unix_s=self._clock.unix_s(), **facts
        )
        told = tended.told
        if told is not None and status == _at(told, status.since_unix_s):
            return
        if told is not None and (told.generation, told.state) == (status.generation, status.state):
            status = _at(status, told.since_unix_s)
        while True:
            try:
                await self._records.tell(status)
            except BusError:
                await self._clock.sleep(_RETRY_S)
            else:
                tended.told = status
                return


def _at(status: ModelStatus, since_unix_s: float) -> ModelStatus:
    return msgspec.structs.replace(status, since_unix_s=since_unix_s)
