"""What the fleet serves right now: the routing table in force, the workers that hold a lease, and what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from fleet_common.scheduling.route import pick_pool, refusing_pools, without_pools
from fleet_contracts.base import Modality, Stage
from fleet_contracts.control import ModelCard, PoolRoute, RoutingTable, WorkerInfo
from fleet_contracts.models import ModelSpec, ModelState, ModelStatus

#: States in which a worker takes or will soon take work: a dependency that is out comes back.
_TAKES_WORK = frozenset({"ready", "paused"})


@dataclass(frozen=True, slots=True)
class Missing:
    """A stage of a served model nobody works at."""

    model: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a name that clients may use stands.

    Attributes:
        card: of the model, or of the model the adapter belongs to; None while no worker has said anything.
        error: why it failed, for operators; "" otherwise.
        parent: the model an adapter belongs to; "" for a model.
    """

    name: str
    state: ModelState
    card: ModelCard | None = None
    error: str = ""
    parent: str = ""

    @property
    def model(self) -> str:
        """Whose workers serve it."""
        return self.parent or self.name


@dataclass(frozen=True, slots=True)
class Catalog:
    """An immutable snapshot; `workers` by registry key, `wanted` and `statuses` by name of the model."""

    table: RoutingTable | None = None
    workers: Mapping[str, WorkerInfo] = field(default_factory=dict)
    wanted: Mapping[str, ModelSpec] = field(default_factory=dict)
    statuses: Mapping[str, ModelStatus] = field(default_factory=dict)

    def with_table(self, table: RoutingTable | None) -> Catalog:
        """The same with another table."""
        return replace(self, table=table)

    def with_worker(self, key: str, worker: WorkerInfo | None) -> Catalog:
        """The same with a worker's entry changed, or gone."""
        workers = {name: info for name, info in self.workers.items() if name != key}
        if worker is not None:
            workers[key] = worker
        return replace(self, workers=workers)

    def with_record(self, record: ModelSpec | ModelStatus) -> Catalog:
        """The same with what is wanted of a model, or what became of it."""
        if isinstance(record, ModelStatus):
            return replace(self, statuses={**self.statuses, record.model: record})
        return replace(self, wanted={**self.wanted, record.model: record})

    def without_model(self, model: str) -> Catalog:
        """The same without the records of a model."""
        return replace(
            self,
            wanted={name: spec for name, spec in self.wanted.items() if name != model},
            statuses={name: status for name, status in self.statuses.items() if name != model},
        )

    def standings(self) -> tuple[Standing, ...]:
        """Every model and adapter there is or shall be, by name."""
        models = {card.model for card in self.cards()} | set(self.wanted)
        adapters = {name for status in self.statuses.values() for name in status.adapters}
        found = (self.standing(name) for name in sorted(models | adapters))
        return tuple(standing for standing in found if standing is not None)

    def standing(self, name: str) -> Standing | None:
        """Where a name stands; None: nobody serves it, and nobody is about to."""
        spec = self.wanted.get(name)
        card = self.card(name)
        if spec is not None:
            return self._standing_of(spec, card)
        if card is not None:
            return Standing(name, ModelState.READY, card)
        for model, status in self.statuses.items():
            parent = self.standing(model) if name in status.adapters else None
            if parent is not None:
                return replace(parent, name=name, parent=model)
        return None

    def _standing_of(self, spec: ModelSpec, card: ModelCard | None) -> Standing | None:
        status = self.statuses.get(spec.model)
        if not spec.is_wanted:
            is_gone = status is not None and status.state is ModelState.GONE
            return None if is_gone else Standing(spec.model, ModelState.DRAINING, card)
        if status is not None and status.generation == spec.generation and status.state is ModelState.FAILED:
            return Standing(spec.model, ModelState.FAILED, card, error=status.error)
        # One that runs and only gets another adapter goes on serving.
        is_ready = status is not None and status.state is ModelState.READY and card is not None
        return Standing(spec.model, ModelState.READY if is_ready else ModelState.LOADING, card)

    def cards(self) -> tuple[ModelCard, ...]:
        """Models of the routing table."""
        return self.table.models if self.table is not None else ()

    def card(self, model: str) -> ModelCard | None:
        """The card of a model, None when it is not served."""
        return self.table.model_card(model) if self.table is not None else None

    def missing(self, states: frozenset[str] = frozenset({"ready"})) -> list[Missing]:
        """Stages of served models without a live worker in one of `states`: not of those that load, failed or leave."""
        return [
            Missing(standing.name, stage)
            for standing in self.standings()
            if standing.state is ModelState.READY and standing.card is not None and not standing.parent
            for stage in stages_of(standing.card)
            if not self.has_worker(stage, standing.name, states)
        ]

    def has_worker(
        self,
        stage: Stage,
        model: str,
        states: frozenset[str] = _TAKES_WORK,
        tags: frozenset[str] = frozenset(),
    ) -> bool:
        """Whether a live worker serves that stage of that model, in a pool where all can read work with `tags`."""
        live = self._live_pools(stage, states) - refusing_pools(self.workers.values(), stage, tags)
        return bool(live & self._routed_pools(stage, model))

    def pick(
        self, stage: Stage, model: str, random_ratio: float, tags: frozenset[str] = frozenset()
    ) -> PoolRoute | None:
        """A pool for new work, by weight among pools with live workers; None when the stage cannot be reached.

        Args:
            tags: what every worker of the pool must be able to read (`Plan.later_tags`).
        """
        route = self.table.route(stage, model) if self.table is not None else None
        if route is None:
            return None
        live = self._live_pools(stage, _TAKES_WORK)
        pools = tuple(pool for pool in route.pools if pool.pool in live)
        route = without_pools(
            msgspec.structs.replace(route, pools=pools), refusing_pools(self.workers.values(), stage, tags)
        )
        return pick_pool(route, random_ratio)

    def _routed_pools(self, stage: Stage, model: str) -> set[str]:
        route = self.table.route(stage, model) if self.table is not None else None
        return {pool.pool for pool in route.pools} if route is not None else set()

    def _live_pools(self, stage: Stage, states: frozenset[str]) -> set[str]:
        return {worker.pool for worker in self.workers.values() if worker.stage == stage and worker.state in states}


def stages_of(card: ModelCard) -> tuple[Stage, ...]:
    """Stages that requests to the model may pass."""
    if Modality.IMAGE in card.output_modalities and Modality.TEXT in card.input_modalities:
        takes_images = Modality.IMAGE in card.input_modalities
        return (Stage.PREPROCESS, Stage.DIFFUSION_GENERATE) if takes_images else (Stage.DIFFUSION_GENERATE,)
    if hears(card):
        return (Stage.PREPROCESS, Stage.AUDIO_TRANSCRIBE)
    if speaks(card):
        return (Stage.AUDIO_SPEAK,)
    if Modality.EMBEDDING in card.output_modalities and Modality.TEXT in card.input_modalities:
        return (Stage.PREPROCESS, Stage.DECODE)
    if Modality.TEXT not in card.output_modalities or Modality.TEXT not in card.input_modalities:
        return ()
    if Modality.IMAGE in card.input_modalities or Modality.AUDIO in card.input_modalities:
        return (Stage.PREPROCESS, Stage.VISION_ENCODE, Stage.DECODE)
    return (Stage.PREPROCESS, Stage.DECODE)


def hears(card: ModelCard) -> bool:
    """Whether the model transcribes: audio in, text out, and no text in."""
    return (
        Modality.AUDIO in card.input_modalities
        and Modality.TEXT not in card.input_modalities
        and Modality.TEXT in card.output_modalities
    )


def speaks(card: ModelCard) -> bool:
    """Whether the model reads aloud: text in, audio out, and no text out."""
    return (
        Modality.TEXT in card.input_modalities
        and Modality.AUDIO in card.output_modalities
        and Modality.TEXT not in card.output_modalities
    )
