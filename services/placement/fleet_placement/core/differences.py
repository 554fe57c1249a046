"""How two tables differ: whether it matters, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleet_contracts.base import WorkerId
from fleet_contracts.control import PoolRoute, Route, RoutingTable
from fleet_placement.core.state import PlacementConfig, PlacementState, RouteKey, WorkerRecord

#: A table says at most this many things about itself.
MAX_REASONS = 16

#: Service times that differ by less than this factor are not called slower or faster.
NOTABLE_FACTOR = 1.2


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed from one table to the next.

    Attributes:
        is_structural: a route, pool, worker or model came, went, or began or ceased to take work.
        moved_ratio: the largest change of any share or weight.
        lost_workers: workers with a part before that the new table does not list.
    """

    is_structural: bool
    moved_ratio: float
    lost_workers: frozenset[WorkerId]


def difference(old: RoutingTable | None, new: RoutingTable) -> Difference:
    """Compare a table with the one in force."""
    if old is None:
        return Difference(is_structural=True, moved_ratio=1.0, lost_workers=frozenset())
    old_parts, new_parts = _parts(old), _parts(new)
    moves = [abs(new_parts.get(key, 0.0) - old_parts.get(key, 0.0)) for key in old_parts.keys() | new_parts.keys()]
    has_switched = any((old_parts.get(key, 0.0) > 0.0) != (part > 0.0) for key, part in new_parts.items())
    held = {key[3] for key, part in old_parts.items() if part > 0.0 and key[3]}
    return Difference(
        is_structural=has_switched
        or old_parts.keys() != new_parts.keys()
        or old.models != new.models
        or old.policy != new.policy
        or _localities(old) != _localities(new),
        moved_ratio=max(moves, default=0.0),
        lost_workers=frozenset(WorkerId(name) for name in held - {key[3] for key in new_parts}),
    )


def _parts(table: RoutingTable) -> dict[tuple[str, str, str, str], float]:
    """Every weight (worker "") and share of a table by (stage, model, pool, worker)."""
    parts: dict[tuple[str, str, str, str], float] = {}
    for route, pool in _pools(table):
        parts[route.stage.value, route.model, pool.pool, ""] = pool.weight_ratio
        for share in pool.workers:
            parts[route.stage.value, route.model, pool.pool, share.worker_id] = share.share_ratio
    return parts


def _localities(table: RoutingTable) -> dict[tuple[str, str, str], str]:
    return {(route.stage.value, route.model, pool.pool): pool.locality for route, pool in _pools(table)}


def _pools(table: RoutingTable) -> Iterator[tuple[Route, PoolRoute]]:
    for route in table.routes:
        for pool in route.pools:
            yield route, pool


def explain(config: PlacementConfig, state: PlacementState, new: RoutingTable, now_s: float) -> tuple[str, ...]:
    """Why `new` differs from the table in force, one sentence per thing that changed."""
    if state.table is None:
        return ("first table",)
    old = state.table
    sentences = [
        *_model_sentences(old, new),
        *_reach_sentences(old, new),
        *_worker_sentences(config, state, new, now_s),
        *_weight_sentences(config, old, new),
    ]
    if old.policy != new.policy:
        sentences.insert(0, f"policy {old.policy} -> {new.policy}")
    unique = list(dict.fromkeys(sentences))
    if len(unique) > MAX_REASONS:
        unique = [*unique[: MAX_REASONS - 1], f"and {len(unique) - MAX_REASONS + 1} more changes"]
    return tuple(unique) or ("locality of a pool changed",)


def _model_sentences(old: RoutingTable, new: RoutingTable) -> Iterator[str]:
    old_cards = {card.model: card for card in old.models}
    new_cards = {card.model: card for card in new.models}
    for model in sorted(old_cards.keys() | new_cards.keys()):
        if model not in old_cards:
            yield f"model {model} can be asked for"
        elif model not in new_cards:
            yield f"model {model} is forgotten: no worker came back"
        elif old_cards[model] != new_cards[model]:
            yield f"the card of model {model} changed"


def _reach_sentences(old: RoutingTable, new: RoutingTable) -> Iterator[str]:
    before, after = _reachable(old), _reachable(new)
    for (stage, model), has_worker in sorted(after.items(), key=lambda entry: (entry[0][0].value, entry[0][1])):
        if before.get((stage, model), False) != has_worker:
            yield f"{stage.value} of {model} {'can be reached' if has_worker else 'has no live worker'}"


def _reachable(table: RoutingTable) -> dict[RouteKey, bool]:
    return {
        (route.stage, route.model): any(share.share_ratio > 0.0 for pool in route.pools for share in pool.workers)
        for route in table.routes
    }


def _worker_sentences(config: PlacementConfig, state: PlacementState, new: RoutingTable, now_s: float) -> Iterator[str]:
    assert state.table is not None
    before, after = _shares(state.table), _shares(new)
    for worker_id in sorted(before.keys() | after.keys()):
        old_share, new_share = before.get(worker_id), after.get(worker_id)
        moved = f"share {old_share or 0.0:.2f} -> {new_share or 0.0:.2f}"
        if new_share is None:
            yield f"{worker_id} is gone, {moved}"
        elif old_share is None:
            yield f"{worker_id} joined, {moved}"
        elif abs(new_share - old_share) >= config.share_change_ratio or (new_share > 0.0) != (old_share > 0.0):
            record = state.workers[worker_id]
            yield f"{worker_id} {_cause(config, state, record, now_s)}, {moved}"


def _shares(table: RoutingTable) -> dict[WorkerId, float]:
    """Share per worker; of several models served, any: they share the worker's slots."""
    return {share.worker_id: share.share_ratio for _, pool in _pools(table) for share in pool.workers}


def _cause(config: PlacementConfig, state: PlacementState, record: WorkerRecord, now_s: float) -> str:
    if not record.is_ready:
        return f"is {record.info.state}"
    silent_s = state.silence_s(record, now_s)
    if silent_s > config.stale_s:
        return f"has not reported for {silent_s:.1f} s"
    before_s = state.told_service_s.get(record.info.worker_id, 0.0)
    service_s = record.measured.service_now_s() if record.measured is not None else 0.0
    if before_s > 0.0 and service_s > before_s * NOTABLE_FACTOR:
        return f"slowed: service {_seconds(service_s)} against {_seconds(before_s)}"
    if before_s > 0.0 and 0.0 < service_s < before_s / NOTABLE_FACTOR:
        return f"sped up: service {_seconds(service_s)} against {_seconds(before_s)}"
    if record.measured is not None and record.measured.queued > record.info.slots:
        return f"has {record.measured.queued} waiting"
    return f"measured beside the others of {record.info.pool}"


def _seconds(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 0.1 else f"{value_s:.4f} s"


def _weight_sentences(config: PlacementConfig, old: RoutingTable, new: RoutingTable) -> Iterator[str]:
    before = {(route.stage, route.model, pool.pool): pool.weight_ratio for route, pool in _pools(old)}
    for route, pool in _pools(new):
        weight = before.get((route.stage, route.model, pool.pool))
        if weight is None:
            yield f"pool {pool.pool} serves {route.stage.value} of {route.model}, weight {pool.weight_ratio:.2f}"
        elif abs(weight - pool.weight_ratio) >= config.share_change_ratio:
            yield (
                f"pool {pool.pool} for {route.stage.value} of {route.model}:"
                f" weight {weight:.2f} -> {pool.weight_ratio:.2f}"
            )
