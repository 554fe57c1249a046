"""`fleet bus apply`: make streams, consumers and buckets what the table says. And the check services make at start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet_common.bus import js, topology
from fleet_common.bus.connection import Connection, logins
from fleet_common.bus.nats import NatsBus
from fleet_common.bus.topology import Account, ConsumerSpec, StreamSpec, TopologyLimits
from fleet_common.errors import BusError
from fleet_common.settings import BusSettings
from fleet_contracts import subjects
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.control import FleetSpec

_TIMEOUT_S = 10.0
_ADVICE = "run `fleet bus apply`"


async def apply(settings: BusSettings, spec: FleetSpec, limits: TopologyLimits | None = None) -> list[str]:
    """Create what is missing, update what differs, retire consumers that are no longer declared and hold nothing.

    Args:
        settings: of the role `admin`.
    Returns:
        One line per change, and per consumer that cannot be retired yet; [] when all was as declared.
    Raises:
        BusError: the broker is out of reach or refused a change.
    """
    limits = limits or TopologyLimits()
    work, control = logins(settings)
    accounts = {
        Account.WORK: Connection(work, "fleet bus apply", lambda: None),
        Account.CONTROL: Connection(control, "fleet bus apply", lambda: None),
    }
    changes: list[str] = []
    try:
        for connection in accounts.values():
            await connection.open()
        for stream in topology.streams(limits):
            changes += await _ensure_stream(accounts[stream.account], stream)
        for stage in Stage:
            wanted = topology.consumers(spec, stage, limits)
            changes += await _ensure_consumers(accounts[Account.WORK], subjects.work_stream(stage), wanted)
        advisory = topology.advisory_consumer(limits)
        changes += await _ensure_consumers(accounts[Account.WORK], advisory.stream, [advisory])
    finally:
        for connection in accounts.values():
            await connection.close()
    return changes


async def verify(
    bus: NatsBus, stage: Stage, pool: str, lanes: Sequence[str], limits: TopologyLimits | None = None
) -> None:
    """Check that a stage's stream and a pool's consumers (every class, these lanes) are what the table says.

    Raises:
        BusError: something is missing or configured differently; the message says what and what to do.
    """
    limits = limits or TopologyLimits()
    connection = bus.connection(Account.WORK)
    name = subjects.work_stream(stage)
    stream = next(item for item in topology.streams(limits) if item.name == name)
    # Sizes are the operator's; what the protocol stands on is not.
    semantic = {key: stream.config[key] for key in ("subjects", "retention", "discard", "allow_msg_ttl")}
    await _check(connection, f"stream {name}", f"STREAM.INFO.{name}", semantic)
    for priority_class in PriorityClass:
        for lane in lanes:
            wanted = topology.consumer(stage, pool, priority_class, lane, limits)
            keys = ("filter_subject", "ack_policy", "ack_wait", "max_deliver")
            config = {key: wanted.config[key] for key in keys}
            await _check(connection, f"consumer {wanted.name}", f"CONSUMER.INFO.{name}.{wanted.name}", config)


async def _check(connection: Connection, what: str, subject: str, wanted: Mapping[str, Any]) -> None:
    found = await _config(connection, subject)
    if found is None:
        raise BusError(f"{what} is missing: {_ADVICE}")
    differences = topology.differences(wanted, found)
    if differences:
        raise BusError(f"{what} is configured differently ({'; '.join(differences)}): {_ADVICE}")


async def _ensure_stream(connection: Connection, spec: StreamSpec) -> list[str]:
    found = await _config(connection, f"STREAM.INFO.{spec.name}")
    if found is None:
        await js.api(connection, f"STREAM.CREATE.{spec.name}", spec.config, _TIMEOUT_S)
        return [f"created stream {spec.name}"]
    differences = topology.differences(spec.config, found)
    if not differences:
        return []
    await js.api(connection, f"STREAM.UPDATE.{spec.name}", {**found, **spec.config}, _TIMEOUT_S)
    return [f"updated stream {spec.name} ({'; '.join(differences)})"]


async def _ensure_consumers(connection: Connection, stream: str, wanted: Sequence[ConsumerSpec]) -> list[str]:
    infos = await js.api_pages(connection, f"CONSUMER.LIST.{stream}", {}, "consumers", _TIMEOUT_S)
    existing = {str(info["name"]): info for info in infos}
    changes: list[str] = []
    for spec in wanted:
        info = existing.pop(spec.name, None)
        differences = topology.differences(spec.config, info["config"]) if info else []
        if info is None or differences:
            body = {"stream_name": stream, "config": spec.config}
            await js.api(connection, f"CONSUMER.DURABLE.CREATE.{stream}.{spec.name}", body, _TIMEOUT_S)
            changes.append(
                f"updated consumer {spec.name} ({'; '.join(differences)})" if info else f"created consumer {spec.name}"
            )
    for name, info in existing.items():
        changes.append(await _retire(connection, stream, name, str(info["config"].get("filter_subject", ""))))
    return changes


async def _retire(connection: Connection, stream: str, name: str, filter_subject: str) -> str:
    """Delete a consumer whose subject holds nothing: items at `max_deliver` are there too, though none is pending."""
    body = {"subjects_filter": filter_subject or ">"}
    answer = await js.api(connection, f"STREAM.INFO.{stream}", body, _TIMEOUT_S)
    num_stored = sum((answer["state"].get("subjects") or {}).values())
    if num_stored:
        return f"kept consumer {name}: {num_stored} messages are left"
    await js.api(connection, f"CONSUMER.DELETE.{stream}.{name}", None, _TIMEOUT_S)
    return f"retired consumer {name}"


async def _config(connection: Connection, subject: str) -> dict[str, Any] | None:
    try:
        answer = await js.api(connection, subject, None, _TIMEOUT_S)
    except js.JetStreamError as err:
        if err.is_not_found:
            return None
        raise
    config: dict[str, Any] = answer["config"]
    return config
