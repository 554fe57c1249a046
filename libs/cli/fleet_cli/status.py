"""`fleet status`: who is there, what waits, who decides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fleet_cli.connect import Target
from fleet_cli.records import ModelRecords
from fleet_common.bus.nats import connect_bus
from fleet_common.bus.port import Bus, BusMessage, ConsumerBacklog
from fleet_common.errors import BusError
from fleet_contracts import codec, subjects
from fleet_contracts.base import WorkerId
from fleet_contracts.control import IngressInfo, LeaderInfo, RoutingTable, Telemetry, WorkerInfo
from fleet_contracts.models import ModelSpec, ModelState, ModelStatus

#: Workers report once a second; a little more for those that are slow.
_LISTEN_S = 1.6

Status = dict[str, Any]
T = TypeVar("T")


async def read_status(target: Target) -> Status:
    """Everything `fleet status --json` prints. Raises BusError when the broker is out of reach."""
    bus = await connect_bus(target.bus, "fleet status")
    try:
        workers, ingresses, num_undecodable = await _registry(bus)
        reports = await _reports(bus, {worker.worker_id for worker in workers})
        backlogs = await bus.pool_pending()
        table = await _table(bus)
        leader = await _leader(bus)
        records = await _records(bus)
    finally:
        await bus.close()
    return {
        "url": target.url,
        "workers": [_worker(worker, reports.get(worker.worker_id)) for worker in workers],
        "pools": pools(backlogs),
        "table": _shown_table(table, time.time()),
        "models": models(table, *records),
        "ingresses": [
            {"ingress_id": i.ingress_id, "url": i.url, "pid": i.pid, "host": i.host, "state": i.state}
            for i in ingresses
        ],
        "leader": None
        if leader is None
        else {"instance_id": leader.instance_id, "pid": leader.pid, "host": leader.host},
        "num_undecodable": num_undecodable,
    }


async def _records(bus: Bus) -> tuple[list[ModelSpec], dict[str, ModelStatus]]:
    """What is wanted, and what became of it; nothing on a fleet whose buckets an older release made."""
    records = ModelRecords(bus)
    try:
        await records.start()
    except BusError:
        return [], {}
    wanted = [spec for spec in records.specs() if spec.is_wanted or not _is_gone(records.status(spec.model))]
    statuses = {spec.model: status for spec in wanted if (status := records.status(spec.model)) is not None}
    await records.stop()
    return wanted, statuses


def _is_gone(status: ModelStatus | None) -> bool:
    return status is not None and status.state is ModelState.GONE


def models(
    table: RoutingTable | None, wanted: Iterable[ModelSpec], statuses: Mapping[str, ModelStatus]
) -> list[Status]:
    """Every model that somebody wants or some worker serves, with its state."""
    found: dict[str, Status] = {
        card.model: {"model": card.model, "state": ModelState.READY.value, "error": "", "adapters": []}
        for card in (table.models if table else ())
    }
    for spec in wanted:
        status = statuses.get(spec.model)
        found[spec.model] = {
            "model": spec.model,
            "state": (status.state if status else ModelState.LOADING).value,
            "error": status.error if status else "",
            "waits_for": status.waits_for if status else "",
            "adapters": list(status.adapters) if status else [],
            "adapter_errors": dict(status.adapter_errors) if status else {},
        }
    return [found[name] for name in sorted(found)]


def read(decode: Callable[[bytes], T], value: bytes) -> T | None:
    """What a process of another release, or a stranger, wrote may be unreadable: the rest is shown all the same."""
    try:
        return decode(value)
    except codec.DecodeError:
        return None


async def _registry(bus: Bus) -> tuple[list[WorkerInfo], list[IngressInfo], int]:
    mirror = await (await bus.kv(subjects.BUCKET_REGISTRY)).mirror()
    entries = dict(mirror.items())
    await mirror.stop()
    infos = [read(codec.decode_registry_entry, value) for _, value in sorted(entries.items())]
    workers = [info for info in infos if isinstance(info, WorkerInfo)]
    return workers, [info for info in infos if isinstance(info, IngressInfo)], infos.count(None)


async def _reports(bus: Bus, expected: set[WorkerId]) -> dict[WorkerId, Telemetry]:
    """The latest report of each worker; listens until all have spoken, or a report's period has passed."""
    reports: dict[WorkerId, Telemetry] = {}
    complete = asyncio.Event()

    async def keep(message: BusMessage) -> None:
        report = read(codec.decode_telemetry, message.payload)
        if report is not None:
            reports[report.worker_id] = report
        if expected <= reports.keys():
            complete.set()

    if not expected:
        return reports
    subscription = await bus.subscribe(subjects.TELEMETRY_ALL, keep)
    try:
        async with asyncio.timeout(_LISTEN_S):
            await complete.wait()
    except TimeoutError:
        # A frozen worker says nothing: it is shown without figures.
        return reports
    finally:
        await subscription.stop()
    return reports


async def _table(bus: Bus) -> RoutingTable | None:
    entry = await (await bus.kv(subjects.BUCKET_ROUTING)).get(subjects.ROUTING_KEY)
    return read(codec.decode_table, entry.value) if entry else None


async def _leader(bus: Bus) -> LeaderInfo | None:
    entry = await (await bus.kv(subjects.BUCKET_LEADER)).get(subjects.LEADER_KEY)
    return read(codec.decode_leader, entry.value) if entry else None


def _worker(worker: WorkerInfo, report: Telemetry | None) -> Status:
    return {
        "worker_id": worker.worker_id,
        "stage": worker.stage.value,
        "pool": worker.pool,
        "pid": worker.pid,
        "host": worker.host,
        "release": worker.release,
        "state": worker.state,
        "slots": worker.slots,
        "in_flight": report.in_flight if report else 0,
        "queued": sum(report.queued.values()) if report else 0,
        "has_reported": report is not None,
        "service_s": report.service_s if report else 0.0,
        "completed_total": report.completed_total if report else 0,
    }


def pools(backlogs: Iterable[ConsumerBacklog]) -> list[Status]:
    """Backlogs added up per pool and class, lanes together."""
    found: dict[tuple[str, str], Status] = {}
    for backlog in backlogs:
        key = (backlog.stage.value, backlog.pool)
        pool = found.setdefault(
            key, {"stage": key[0], "pool": key[1], "pending": {}, "num_pending": 0, "num_unsettled": 0}
        )
        classes = pool["pending"]
        name = backlog.priority_class.value
        classes[name] = classes.get(name, 0) + backlog.num_pending
        pool["num_pending"] += backlog.num_pending
        pool["num_unsettled"] += backlog.num_ack_pending
    return [found[key] for key in sorted(found)]


def _shown_table(table: RoutingTable | None, now_unix_s: float) -> Status | None:
    if table is None:
        return None
    return {
        "revision": table.revision,
        "age_s": round(now_unix_s - table.made_unix_s, 1),
        "policy": table.policy,
        "reasons": list(table.reasons),
        "routes": [
            {
                "stage": route.stage.value,
                "model": route.model,
                "pools": [
                    {
                        "pool": pool.pool,
                        "weight_ratio": pool.weight_ratio,
                        "shares": {share.worker_id: share.share_ratio for share in pool.workers},
                    }
                    for pool in route.pools
                ],
            }
            for route in table.routes
        ],
    }


def show_json(status: Status) -> str:
    """For machines."""
    return json.dumps(status, indent=2)


def show(status: Status, console: Console) -> None:
    """For people."""
    shares = {
        worker: share
        for route in (status["table"] or {"routes": []})["routes"]
        for pool in route["pools"]
        for worker, share in pool["shares"].items()
    }
    for entry in status["models"]:
        why = f": {entry['error'] or entry.get('waits_for')}" if entry["error"] or entry.get("waits_for") else ""
        adapters = f", adapters {', '.join(entry['adapters'])}" if entry["adapters"] else ""
        console.print(f"model {entry['model']}: {entry['state']}{why}{adapters}", markup=False, highlight=False)
    console.print(_workers_table(status["workers"], shares))
    console.print(_pools_table(status["pools"]))
    table = status["table"]
    if table is None:
        console.print("no routing table yet")
    else:
        console.print(
            f"routing table: revision {table['revision']}, {table['age_s']:.0f} s old, policy {table['policy']}"
        )
        for reason in table["reasons"]:
            console.print(f"  {reason}", markup=False, highlight=False)
    leader = status["leader"]
    console.print(f"placement: {leader['instance_id']} (pid {leader['pid']})" if leader else "placement: nobody leads")
    for ingress in status["ingresses"]:
        console.print(f"ingress: {ingress['url']} ({ingress['state']}, pid {ingress['pid']})", markup=False)
    if status["num_undecodable"]:
        console.print(f"registry: {status['num_undecodable']} entries nobody can read")


def _grid(title: str, columns: tuple[str, ...]) -> Table:
    """A table that fits 80 columns and never breaks a name."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _workers_table(workers: list[Status], shares: Mapping[str, float]) -> Table:
    table = _grid("workers", ("worker", "pool", "state", "release", "pid", "runs", "queued", "service", "share"))
    for worker in workers:
        table.add_row(
            worker["worker_id"],
            worker["pool"],
            worker["state"] if worker["has_reported"] else f"{worker['state']}, silent",
            worker["release"],
            str(worker["pid"]),
            f"{worker['in_flight']}/{worker['slots']}",
            str(worker["queued"]),
            f"{worker['service_s']:.3f} s",
            f"{shares.get(worker['worker_id'], 0.0):.2f}",
        )
    return table


def _pools_table(found: list[Status]) -> Table:
    table = _grid("waiting in the broker", ("pool", "stage", "realtime", "batch", "background", "delivered"))
    for pool in found:
        pending = pool["pending"]
        classes = (str(pending.get(name, 0)) for name in ("realtime", "batch", "background"))
        table.add_row(pool["pool"], pool["stage"], *classes, str(pool["num_unsettled"]))
    return table
