"""The state machine of placement: `step(config, state, event, now_s) -> (state, effects)`. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from fleet_contracts.base import WorkerId
from fleet_contracts.control import ModelCard, RoutingTable, Telemetry, WorkerInfo
from fleet_placement.core.differences import difference, explain
from fleet_placement.core.events import (
    BacklogMeasured,
    Deposed,
    Effect,
    Event,
    Interrupted,
    Leading,
    ModelWanted,
    PublishTable,
    ReportDoubted,
    TelemetryReceived,
    Tick,
    WorkerGone,
    WorkerSeen,
)
from fleet_placement.core.measure import clean, observe
from fleet_placement.core.state import KnownPool, PlacementConfig, PlacementState, RouteKey, WorkerRecord
from fleet_placement.core.table import build_table

Effects = tuple[Effect, ...]


def step(config: PlacementConfig, state: PlacementState, event: Event, now_s: float) -> tuple[PlacementState, Effects]:
    """Take one event in.

    Args:
        now_s: monotonic seconds, never less than at the call before.
    """
    match event:
        case WorkerSeen(info):
            known = state.workers.get(info.worker_id)
            if known is not None and known.gone_s is None and known.info == info:
                return state, ()
            return _published(config, _with_worker(state, info, now_s), now_s)
        case WorkerGone(worker_id):
            return _published(config, _without_lease(state, worker_id, now_s), now_s)
        case TelemetryReceived(report):
            return _with_report(config, state, report, now_s)
        case BacklogMeasured(pending, unsettled):
            return replace(state, pending=dict(pending), unsettled=unsettled), ()
        case ModelWanted(model, is_wanted):
            unwanted = state.unwanted - {model} if is_wanted else state.unwanted | {model}
            return replace(state, unwanted=unwanted), ()
        case Leading(table):
            return _leading(config, state, table, now_s)
        case Deposed():
            return replace(state, is_leading=False), ()
        case Interrupted():
            return replace(state, hold_until_s=now_s + config.grace_s, listening_since_s=now_s), ()
        case Tick():
            return _published(config, _aged(config, state, now_s), now_s)


def _with_worker(state: PlacementState, info: WorkerInfo, now_s: float) -> PlacementState:
    known = state.workers.get(info.worker_id)
    # Another process under the same name starts from nothing.
    is_same = known is not None and (known.info.pid, known.info.host) == (info.pid, info.host)
    record = replace(known, info=info, gone_s=None) if known and is_same else WorkerRecord(info=info, joined_s=now_s)
    return replace(
        state,
        workers={**state.workers, info.worker_id: record},
        pools=_with_pools(state.pools, info, now_s),
    )


def _with_pools(
    pools: Mapping[RouteKey, Mapping[str, KnownPool]], info: WorkerInfo, now_s: float
) -> Mapping[RouteKey, Mapping[str, KnownPool]]:
    changed = dict(pools)
    for card in info.cards:
        key = (info.stage, card.model)
        entry = KnownPool(card=card, locality=info.locality, seen_s=now_s)
        changed[key] = {**changed.get(key, {}), info.pool: entry}
    return changed


def _without_lease(state: PlacementState, worker_id: WorkerId, now_s: float) -> PlacementState:
    record = state.workers.get(worker_id)
    if record is None:
        return state
    if not record.is_ready:
        # It said that it was leaving: no need to wait and see.
        return replace(state, workers={name: kept for name, kept in state.workers.items() if name != worker_id})
    return replace(state, workers={**state.workers, worker_id: replace(record, gone_s=record.gone_s or now_s)})


def _with_report(
    config: PlacementConfig, state: PlacementState, report: Telemetry, now_s: float
) -> tuple[PlacementState, Effects]:
    record = state.workers.get(report.worker_id)
    if record is None:
        # Its registration is on the way, or it is not one of ours.
        return state, ()
    cleaned, reasons = clean(report, record.info)
    measured = record.measured
    if cleaned is not None:
        measured = observe(measured, cleaned, now_s, config.half_life_s)
    doubts = (ReportDoubted(report.worker_id, reasons),) if reasons and not record.doubted else ()
    changed = replace(record, measured=measured, doubted=bool(reasons))
    return replace(state, workers={**state.workers, report.worker_id: changed}), doubts


def _leading(
    config: PlacementConfig, state: PlacementState, table: RoutingTable | None, now_s: float
) -> tuple[PlacementState, Effects]:
    pools = dict(state.pools)
    for route in table.routes if table else ():
        remembered = {
            pool.pool: KnownPool(
                card=(table.model_card(route.model) if table else None) or ModelCard(model=route.model),
                locality=pool.locality,
                seen_s=now_s,
            )
            for pool in route.pools
        }
        pools[route.stage, route.model] = {**remembered, **pools.get((route.stage, route.model), {})}
    led = replace(
        state,
        is_leading=True,
        table=table,
        pools=pools,
        # The workers of the table in force may only be late to register, and their load is not measured yet.
        hold_until_s=max(state.hold_until_s, now_s + config.grace_s if table else now_s),
        next_table_s=now_s + config.interval_s,
    )
    return _published(config, led, now_s)


def _aged(config: PlacementConfig, state: PlacementState, now_s: float) -> PlacementState:
    """Take out who is dead and forget what nobody came back for."""
    workers = {
        name: record
        for name, record in state.workers.items()
        if record.gone_s is None or now_s < max(record.gone_s + config.gone_settle_s, state.hold_until_s)
    }
    staffed = {
        (record.info.stage, card.model, record.info.pool) for record in workers.values() for card in record.info.cards
    }
    pools: dict[RouteKey, Mapping[str, KnownPool]] = {}
    for (stage, model), known in state.pools.items():
        kept = {
            pool: replace(entry, seen_s=now_s) if (stage, model, pool) in staffed else entry
            for pool, entry in known.items()
            if (stage, model, pool) in staffed
            # A pool is retired only when empty.
            or (stage, pool) in state.unsettled
            # One that may come back is remembered, not one that was taken off.
            or (model not in state.unwanted and now_s - entry.seen_s < config.forget_s)
        }
        if kept:
            pools[stage, model] = kept
    return replace(state, workers=workers, pools=pools, told_service_s={**_services(workers), **state.told_service_s})


def _services(workers: Mapping[WorkerId, WorkerRecord]) -> dict[WorkerId, float]:
    """Service time of every worker that was measured."""
    services = {name: record.measured.service_now_s() for name, record in workers.items() if record.measured}
    return {name: service_s for name, service_s in services.items() if service_s > 0.0}


def _published(config: PlacementConfig, state: PlacementState, now_s: float) -> tuple[PlacementState, Effects]:
    """Publish if what is known asks for another table now."""
    if not state.is_leading or (state.table is None and not state.pools):
        return state, ()
    new = build_table(config, state, now_s)
    change = difference(state.table, new)
    if change.lost_workers and now_s < state.hold_until_s:
        return state, ()
    is_due = now_s >= state.next_table_s and change.moved_ratio >= config.share_change_ratio
    if not (change.is_structural or is_due):
        return state, ()
    table = msgspec.structs.replace(
        new,
        revision=(state.table.revision if state.table else 0) + 1,
        reasons=explain(config, state, new, now_s),
    )
    led = replace(state, table=table, told_service_s=_services(state.workers), next_table_s=now_s + config.interval_s)
    return led, (PublishTable(table),)
