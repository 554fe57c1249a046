"""Pick the pool of a step from the routing table, and the lane within it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from fleet_contracts import subjects
from fleet_contracts.base import ANY_LANE, Stage, WorkerId
from fleet_contracts.control import PoolRoute, Route, RoutingTable, WorkerInfo


def pick_pool(route: Route, random_ratio: float) -> PoolRoute | None:
    """The pool at `random_ratio` (0 <= x < 1) of the weights; None when the route has no pool.

    Weights need not sum to 1; when all are 0 the first pool is taken, as accepted work must go somewhere.
    """
    if not route.pools:
        return None
    total = sum(max(0.0, pool.weight_ratio) for pool in route.pools)
    if total <= 0:
        return route.pools[0]
    point = random_ratio * total
    for pool in route.pools:
        point -= max(0.0, pool.weight_ratio)
        if point < 0:
            return pool
    return max(route.pools, key=lambda pool: pool.weight_ratio)


def refusing_pools(workers: Iterable[WorkerInfo], stage: Stage, tags: frozenset[str]) -> frozenset[str]:
    """Pools of a stage in which some worker cannot read work with these tags (a release before them).

    Its pool is a queue that any of them may pull from, so one such worker is enough.
    """
    if not tags:
        return frozenset()
    return frozenset(worker.pool for worker in workers if worker.stage == stage and not worker.accepts(tags))


def without_pools(route: Route, pools: frozenset[str]) -> Route:
    """The same without some of its pools."""
    if not pools:
        return route
    return msgspec.structs.replace(route, pools=tuple(pool for pool in route.pools if pool.pool not in pools))


#: A worker whose share is below this part of an even one is overloaded, slow or silent.
_OVERLOADED_RATIO = 0.5


def pick_lane(pool: PoolRoute, holders: Collection[WorkerId], random_ratio: float) -> str:
    """The lane of a worker that holds what the step needs in memory already; any when none does, or all are overloaded.

    Args:
        holders: workers that pull from lanes of their own and hold it.
        random_ratio: 0 <= x < 1: which of several.
    """
    if len(pool.workers) < 2:
        return ANY_LANE
    least = _OVERLOADED_RATIO / len(pool.workers)
    able = [s.worker_id for s in pool.workers if s.worker_id in holders and s.share_ratio >= least]
    return subjects.worker_lane(able[int(random_ratio * len(able))]) if able else ANY_LANE


def share_of(table: RoutingTable | None, pool: str, worker_id: WorkerId) -> tuple[float, int]:
    """(own share of the pool's look-ahead 0-1, workers in the pool); (1.0, 1) while no table knows the worker."""
    for route in table.routes if table is not None else ():
        for candidate in route.pools:
            if candidate.pool != pool:
                continue
            for share in candidate.workers:
                if share.worker_id == worker_id:
                    return share.share_ratio, len(candidate.workers)
    return 1.0, 1
