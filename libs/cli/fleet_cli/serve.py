"""`fleet serve` and `fleet unserve`: say what is wanted, then wait for what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fleet_cli.connect import Target
from fleet_cli.errors import CliError
from fleet_cli.records import ModelRecords
from fleet_cli.up import adapters, model
from fleet_common.bus.nats import connect_bus
from fleet_contracts.base import Stage
from fleet_contracts.models import AdapterSpec, ModelSpec, ModelState, ModelStatus

_POLL_S = 0.2

#: Nobody takes a command up for that long: there is no `fleet up` on this fleet.
_TAKE_UP_S = 15.0

_STAGES: Mapping[str, Stage] = {
    "vision": Stage.VISION_ENCODE,
    **{stage.value: stage for stage in Stage},
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `fleet serve` was told besides the model."""

    name: str = ""
    replicas: Mapping[Stage, int] = field(default_factory=dict)
    engine_args: Mapping[Stage, Mapping[str, Any]] = field(default_factory=dict)
    adapters: tuple[AdapterSpec, ...] = ()
    takes_adapters: bool = False


def parse_replicas(texts: Sequence[str]) -> dict[Stage, int]:
    """`decode=2` -> workers per stage. Raises CliError."""
    found = {}
    for stage, value in (_pair(text, "--replicas") for text in texts):
        if not value.isdigit() or int(value) < 1:
            raise CliError(f"--replicas {stage}={value}: a whole number from 1 on is needed")
        found[_stage(stage, "--replicas")] = int(value)
    return found


def parse_stage_args(texts: Sequence[str]) -> dict[Stage, dict[str, Any]]:
    """`decode={"max_model_len":2048}` -> engine arguments per stage. Raises CliError."""
    found: dict[Stage, dict[str, Any]] = {}
    for stage, value in (_pair(text, "--stage-args") for text in texts):
        try:
            arguments = json.loads(value)
        except ValueError as err:
            raise CliError(f"--stage-args {stage}: this is no JSON: {value[:200]}") from err
        if not isinstance(arguments, dict):
            raise CliError(f"--stage-args {stage}: a JSON object is needed")
        found.setdefault(_stage(stage, "--stage-args"), {}).update(arguments)
    return found


def parse_adapters(texts: Sequence[str]) -> tuple[AdapterSpec, ...]:
    """`pirate=/adapters/pirate` -> adapters. Raises CliError."""
    found = {}
    for name, path in (_pair(text, "--adapter") for text in texts):
        if not adapters.is_name(name):
            raise CliError(f"--adapter {name}: letters, digits, dots, dashes and underscores make a name")
        found[name] = AdapterSpec(name=name, path=str(Path(path).expanduser().resolve()))
    return tuple(found.values())


def _pair(text: str, option: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise CliError(f"{option} {text}: NAME=VALUE is needed")
    return name, value


def _stage(text: str, option: str) -> Stage:
    if text not in _STAGES:
        raise CliError(f"{option} {text}: the stages are {', '.join(sorted(_STAGES))}")
    return _STAGES[text]


def wanted_model(
    source: str, options: ServeOptions, known: ModelSpec | None, status: ModelStatus | None, now_unix_s: float
) -> ModelSpec:
    """The record to write. Pure.

    Args:
        known: what was wanted of that name before; `status` what became of it.
    Raises:
        CliError: a model of that name runs from another source or with other arguments.
    """
    wanted = ModelSpec(
        model=options.name or model.shown_name(source),
        source=model.absolute_source(source),
        generation=_next_generation(known, now_unix_s),
        replicas=dict(options.replicas),
        engine_args={stage: dict(arguments) for stage, arguments in options.engine_args.items()},
        adapters=options.adapters,
        takes_adapters=options.takes_adapters or bool(options.adapters),
    )
    is_served = known is not None and known.is_wanted and not (status and status.state is ModelState.FAILED)
    if known is None or not is_served:
        return wanted
    shape = ("source", "replicas", "engine_args")
    if any(getattr(known, name) != getattr(wanted, name) for name in shape):
        raise CliError(
            f"{wanted.model} is served in another way: `fleet unserve {wanted.model}` first, or give a --name"
        )
    return with_adapters(known, options.adapters, now_unix_s)


def with_adapters(known: ModelSpec, more: Sequence[AdapterSpec], now_unix_s: float) -> ModelSpec:
    """A model that is served, with more adapters; one of the same name is replaced. Pure.

    Raises:
        CliError: its engine has no room for any.
    """
    if more and not known.takes_adapters:
        raise CliError(f"{known.model} was not served with room for adapters: unserve it, then serve it with --lora")
    merged = {adapter.name: adapter for adapter in (*known.adapters, *more)}
    return msgspec.structs.replace(
        known, adapters=tuple(merged.values()), generation=_next_generation(known, now_unix_s)
    )


def without_adapters(known: ModelSpec, names: Collection[str]) -> ModelSpec:
    """A model that is served, without some of its adapters. Pure."""
    left = tuple(adapter for adapter in known.adapters if adapter.name not in names)
    return msgspec.structs.replace(known, adapters=left, generation=known.generation + 1)


def unwanted_model(name: str, specs: Sequence[ModelSpec], now_unix_s: float) -> ModelSpec:
    """The record that takes a model, or one adapter, off. Pure. Raises CliError when nothing is called so."""
    for known in specs:
        if known.is_wanted and known.model == name:
            generation = _next_generation(known, now_unix_s)
            return msgspec.structs.replace(known, is_wanted=False, generation=generation)
    for known in specs:
        if known.is_wanted and any(adapter.name == name for adapter in known.adapters):
            return without_adapters(known, {name})
    served = ", ".join(known.model for known in specs if known.is_wanted) or "none"
    raise CliError(f"no model and no adapter is called {name}; served: {served}")


def _next_generation(known: ModelSpec | None, now_unix_s: float) -> int:
    return max(known.generation + 1 if known else 0, int(now_unix_s * 1000))


def check_names(wanted: ModelSpec, specs: Sequence[ModelSpec]) -> None:
    """Raises CliError when a name would mean two things."""
    taken = {known.model: known.model for known in specs if known.is_wanted}
    for known in specs:
        if known.is_wanted and known.model != wanted.model:
            taken |= {adapter.name: f"an adapter of {known.model}" for adapter in known.adapters}
    for name in (wanted.model, *(adapter.name for adapter in wanted.adapters)):
        if name in taken and not (name == wanted.model == taken[name]):
            raise CliError(f"{name} is a name already: {taken[name]}")


async def serve(target: Target, source: str, options: ServeOptions, on: str, say: Callable[[str], None]) -> ModelStatus:
    """Have a model served, or adapters added to one, and wait until it is ready.

    Args:
        source: a model; "" with `on`.
        on: name of a served model that gets the adapters.
        say: told of progress.
    Raises:
        CliError: it was refused or failed; the message says why.
        BusError: the broker is out of reach.
    """
    async with _records(target) as records:
        now_unix_s = time.time()
        if on:
            known = records.spec(on)
            if known is None or not known.is_wanted:
                raise CliError(f"no model is called {on}")
            wanted = with_adapters(known, options.adapters, now_unix_s)
        else:
            name = options.name or model.shown_name(source)
            wanted = wanted_model(source, options, records.spec(name), records.status(name), now_unix_s)
        check_names(wanted, records.specs())
        await records.want(wanted)
        status = await _outcome(records, wanted, say, {ModelState.READY, ModelState.FAILED})
    if status.state is ModelState.FAILED:
        raise CliError(f"{wanted.model} failed to load: {status.error}")
    asked = {adapter.name for adapter in options.adapters}
    refused = {name: why for name, why in status.adapter_errors.items() if name in asked}
    if refused:
        # Nobody will ask for them: their names are free again.
        async with _records(target) as records:
            await records.want(without_adapters(wanted, refused))
        raise CliError("; ".join(f"adapter {name} cannot be used: {why}" for name, why in refused.items()))
    return status


async def unserve(target: Target, name: str, say: Callable[[str], None]) -> None:
    """Take a model or an adapter off and wait until nothing of it is left. Raises CliError, BusError."""
    async with _records(target) as records:
        wanted = unwanted_model(name, records.specs(), time.time())
        await records.want(wanted)
        end = ModelState.READY if wanted.is_wanted else ModelState.GONE
        await _outcome(records, wanted, say, {end, ModelState.FAILED})


async def _outcome(
    records: ModelRecords, wanted: ModelSpec, say: Callable[[str], None], ends: set[ModelState]
) -> ModelStatus:
    """Until it stands at one of `ends`, however long that takes: whoever is tired of it presses Ctrl-C."""
    begun_s = time.monotonic()
    told = ""
    while True:
        status = records.status(wanted.model)
        if status is not None and status.generation == wanted.generation:
            if status.state in ends:
                return status
            text = f"{wanted.model} is {status.state.value}" + (f": {status.waits_for}" if status.waits_for else "")
            if text != told:
                told = text
                say(text)
        elif time.monotonic() - begun_s > _TAKE_UP_S:
            raise CliError("nobody takes this up: `fleet serve` needs a fleet started by `fleet up`")
        await asyncio.sleep(_POLL_S)


@contextlib.asynccontextmanager
async def _records(target: Target) -> AsyncIterator[ModelRecords]:
    bus = await connect_bus(target.bus, "fleet serve")
    records = ModelRecords(bus)
    try:
        await records.start()
        yield records
        await records.stop()
    finally:
        await bus.close()
