"""From what is known to a routing table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fleet_contracts.base import Modality, Stage
from fleet_contracts.control import ModelCard, PoolRoute, Route, RoutingTable, WorkerShare
from fleet_placement.core.policies.port import Taker
from fleet_placement.core.state import KnownPool, PlacementConfig, PlacementState, RouteKey, WorkerRecord

#: Stages whose output is what the client asked for: their models are the ones clients can name.
TERMINAL_STAGES = (Stage.DECODE, Stage.DIFFUSION_GENERATE, Stage.AUDIO_TRANSCRIBE, Stage.AUDIO_SPEAK)


def build_table(config: PlacementConfig, state: PlacementState, now_s: float) -> RoutingTable:
    """The table that fits what is known now; revision and reasons are the caller's business.

    A pool without a live worker gets nothing while another pool of its route has one. A route without any keeps equal
    weights, so that work in progress can wait in its queues; its pools then list no worker with a share.
    """
    routes = tuple(_route(config, state, key, now_s) for key in sorted(state.pools, key=_route_order))
    return RoutingTable(
        revision=state.table.revision if state.table else 0,
        made_unix_s=0.0,
        policy=config.policy.name,
        routes=routes,
        models=_models(state.pools),
    )


def _route_order(key: RouteKey) -> tuple[str, str]:
    return key[0].value, key[1]


def _route(config: PlacementConfig, state: PlacementState, key: RouteKey, now_s: float) -> Route:
    stage, model = key
    members = {pool: _members(state, stage, model, pool) for pool in sorted(state.pools[key])}
    shares = {
        pool: config.policy.weights([worker_taker(config, state, record, now_s) for record in records])
        for pool, records in members.items()
    }
    weights = config.policy.weights(
        [_pool_taker(config, state, (stage, pool), records, now_s) for pool, records in members.items()]
    )
    if sum(weights.values()) == 0.0:
        weights = dict.fromkeys(members, 1.0 / len(members))
    return Route(
        stage=stage,
        model=model,
        pools=tuple(
            PoolRoute(
                pool=pool,
                weight_ratio=round(weights[pool], 6),
                locality=_locality(records, state.pools[key][pool]),
                workers=tuple(
                    WorkerShare(
                        worker_id=record.info.worker_id, share_ratio=round(shares[pool][record.info.worker_id], 6)
                    )
                    for record in records
                ),
            )
            for pool, records in members.items()
        ),
    )


def _members(state: PlacementState, stage: Stage, model: str, pool: str) -> list[WorkerRecord]:
    """Workers of a pool that serve the model, those that take nothing at the moment included; by name."""
    records = [
        record
        for record in state.workers.values()
        if (record.info.stage, record.info.pool) == (stage, pool)
        and any(card.model == model for card in record.info.cards)
    ]
    return sorted(records, key=lambda record: record.info.worker_id)


def _locality(records: Sequence[WorkerRecord], known: KnownPool) -> str:
    """Where the pool's workers share an arena; "" when they are on several hosts."""
    localities = {record.info.locality for record in records}
    return localities.pop() if len(localities) == 1 else "" if localities else known.locality


def worker_taker(config: PlacementConfig, state: PlacementState, record: WorkerRecord, now_s: float) -> Taker:
    """A worker as the policy sees it."""
    measured = record.measured
    return Taker(
        name=record.info.worker_id,
        slots=record.info.slots,
        service_s=measured.service_now_s() if measured is not None else 0.0,
        queued=measured.queued if measured is not None else 0,
        freshness_ratio=freshness_ratio(config, state.silence_s(record, now_s)),
        is_live=record.is_ready,
    )


def freshness_ratio(config: PlacementConfig, age_s: float) -> float:
    """1 up to `stale_s`, then down to 0 at `silent_s`."""
    if age_s <= config.stale_s:
        return 1.0
    if age_s >= config.silent_s:
        return 0.0
    return 0.5 * (config.silent_s - age_s) / (config.silent_s - config.stale_s)


def _pool_taker(
    config: PlacementConfig,
    state: PlacementState,
    route: tuple[Stage, str],
    records: Sequence[WorkerRecord],
    now_s: float,
) -> Taker:
    """A pool as the policy sees it: its live workers taken together."""
    stage, pool = route
    takers = [taker for record in records if (taker := worker_taker(config, state, record, now_s)).is_live]
    slots = sum(taker.slots for taker in takers)
    measured = [taker for taker in takers if taker.service_s > 0.0]
    # Harmonic mean by slots: the pool's rate is the sum of its workers' rates.
    rate = sum(taker.slots / taker.service_s for taker in measured)
    return Taker(
        name=pool,
        slots=max(1, slots),
        service_s=sum(taker.slots for taker in measured) / rate if rate > 0.0 else 0.0,
        queued=state.pending.get((stage, pool), 0) + sum(taker.queued for taker in takers),
        freshness_ratio=max((taker.freshness_ratio for taker in takers), default=0.0),
        is_live=bool(takers),
    )


def _models(pools: Mapping[RouteKey, Mapping[str, KnownPool]]) -> tuple[ModelCard, ...]:
    """A card per model that can be asked for: its terminal stage's, completed by what its encoder says."""
    cards: dict[str, ModelCard] = {}
    for stage, model in sorted(pools, key=_route_order):
        if stage in TERMINAL_STAGES and model not in cards:
            cards[model] = _first_card(pools[stage, model].values())
    for model, card in cards.items():
        encoder = pools.get((Stage.VISION_ENCODE, model))
        if encoder:
            cards[model] = completed_by_encoder(card, _first_card(encoder.values()))
        elif card.pictures is not None and (Stage.PREPROCESS, model) not in pools:
            # Nobody reads the files it would edit.
            cards[model] = msgspec.structs.replace(card, input_modalities=(Modality.TEXT,), max_images=0)
    return tuple(cards[model] for model in sorted(cards))


def _first_card(pools: Iterable[KnownPool]) -> ModelCard:
    """The oldest statement, so that the card does not change when a pool joins."""
    return min((pool.card for pool in pools), key=lambda card: (card.created_unix_s, card.revision))


def completed_by_encoder(card: ModelCard, encoder: ModelCard) -> ModelCard:
    """What the decoder does not know of its images and recordings, from the encoder's card."""
    return msgspec.structs.replace(
        card,
        input_modalities=_union(card.input_modalities, encoder.input_modalities),
        image_tokens=card.image_tokens or encoder.image_tokens,
        hidden_size=card.hidden_size or encoder.hidden_size,
        max_images=card.max_images or encoder.max_images,
        max_audios=card.max_audios or encoder.max_audios,
    )


def _union(first: tuple[Modality, ...], second: tuple[Modality, ...]) -> tuple[Modality, ...]:
    return first + tuple(modality for modality in second if modality not in first)
