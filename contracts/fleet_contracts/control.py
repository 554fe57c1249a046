"""Control messages: worker registry, telemetry, routing tables."""

from __future__ import annotations

from fleet_contracts.base import Contract, Modality, Stage, WorkerId


class PictureLimits(Contract, frozen=True, kw_only=True):
    """What a model that makes pictures can be asked for; sizes in pixels.

    Attributes:
        default_width, default_height: of a request that names no size.
        size_step: width and height are multiples of it.
        max_side, max_pixels: of one picture.
        default_steps, max_steps: denoising steps.
        default_guidance: scale of classifier-free guidance of a request that names none.
        max_pictures: per request.
        max_prompt_chars: of the prompt, and of what the picture must not show.
    """

    default_width: int
    default_height: int
    size_step: int
    max_side: int
    max_pixels: int
    default_steps: int
    max_steps: int
    default_guidance: float
    max_pictures: int
    max_prompt_chars: int


class ModelCard(Contract, frozen=True, kw_only=True):
    """What a worker says of the model it serves.

    Attributes:
        model: name clients use.
        context_tokens: prompt + output limit (decode; 0 elsewhere).
        image_tokens: tokens per image at the default budget; 0 when no images.
        hidden_size: width of embeddings.
        revision: identifies the weights; part of content hashes.
        max_images, max_audios: images and recordings per request; 0 = none.
        pictures: of a model that makes pictures.
        voices: names of the voices of a model that speaks, its default first.
        languages: ISO 639-1 codes of the languages a model hears; () = it does not tell.
        embedding_dimensions: widths below `hidden_size` that its vectors may be cut to.
    """

    model: str
    input_modalities: tuple[Modality, ...] = (Modality.TEXT,)
    output_modalities: tuple[Modality, ...] = (Modality.TEXT,)
    context_tokens: int = 0
    image_tokens: int = 0
    hidden_size: int = 0
    revision: str = ""
    max_images: int = 0
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    created_unix_s: float = 0.0
    pictures: PictureLimits | None = None
    embedding_dimensions: tuple[int, ...] = ()
    max_audios: int = 0


class WorkerInfo(Contract, frozen=True, kw_only=True, tag="worker_info.v1"):
    """A registry entry, kept alive by its worker (lease: the bucket's TTL).

    Attributes:
        state: `starting`, `ready`, `draining`, `paused` (a dependency is out), `stalled` (its engine hangs).
        slots: items the worker runs at once.
        locality: domain within which the shared-memory arena can be used (host boot id by default).
        accepted_tags: tags of work this release consumes: the task's and those of step parameters. Workers of the
            first release name the task's only, see `FIRST_RELEASE_TAGS`.
        adapters: LoRA adapters it has in memory (decode); only a worker that pulls from a lane of its own says so.
    """

    worker_id: WorkerId
    stage: Stage
    pool: str
    host: str
    pid: int
    state: str
    slots: int
    locality: str
    cards: tuple[ModelCard, ...] = ()
    device: str = "cpu"
    release: str = ""
    started_unix_s: float = 0.0
    accepted_tags: tuple[str, ...] = ("step_task.v1",)
    adapters: tuple[str, ...] = ()

    def accepts(self, tags: frozenset[str]) -> bool:
        """Whether it can read a task whose plan holds these tags besides those of the first release."""
        return tags.issubset(self.accepted_tags)


class IngressInfo(Contract, frozen=True, kw_only=True, tag="ingress_info.v1"):
    """An ingress's lease in the registry: work that is no job dies with it."""

    ingress_id: str
    host: str
    pid: int
    url: str
    state: str = "ready"


class LeaderInfo(Contract, frozen=True, kw_only=True, tag="leader_info.v1"):
    """Who leads placement, and since when; the key lives as long as the lease.

    Attributes:
        instance_id: unique to one process: a lease with another one is another leader's.
    """

    instance_id: str
    host: str
    pid: int
    since_unix_s: float
    url: str = ""


class Telemetry(Contract, frozen=True, kw_only=True, tag="telemetry.v1"):
    """A worker's report, once a second. Counters are totals since its start.

    Attributes:
        queued: items held and not started, per class.
        in_flight: items being run.
        completed_total, failed_total: items finished.
        busy_s_total: seconds in which the engine ran something.
        service_s: mean engine seconds per item over the last window, 0 when unknown.
        queue_wait_s: mean seconds from enqueue to start over the last window.
        utilisation_ratio: share of slots in use, averaged over the window, 0-1.
        kv_cache_usage_ratio: decode only.
        store_bytes: bytes this worker holds in the tensor store.
    """

    worker_id: WorkerId
    stage: Stage
    pool: str
    sent_unix_s: float
    slots: int
    state: str
    queued: dict[str, int] = {}
    in_flight: int = 0
    completed_total: int = 0
    failed_total: int = 0
    busy_s_total: float = 0.0
    service_s: float = 0.0
    queue_wait_s: float = 0.0
    utilisation_ratio: float = 0.0
    kv_cache_usage_ratio: float = 0.0
    store_bytes: int = 0


class WorkerShare(Contract, frozen=True, kw_only=True):
    """A worker's part of its pool's look-ahead, 0-1; shares of a pool sum to 1."""

    worker_id: WorkerId
    share_ratio: float


class PoolRoute(Contract, frozen=True, kw_only=True):
    """One pool of a (stage, model).

    Attributes:
        weight_ratio: part of new work this pool gets, 0-1; the weights of a route sum to 1.
        locality: where its workers are; the arena is used only within it.
    """

    pool: str
    weight_ratio: float
    locality: str
    workers: tuple[WorkerShare, ...] = ()


class Route(Contract, frozen=True, kw_only=True):
    """All pools that serve one model at one stage."""

    stage: Stage
    model: str
    pools: tuple[PoolRoute, ...]


class RoutingTable(Contract, frozen=True, kw_only=True, tag="routing_table.v1"):
    """What placement publishes; the last one stays in force when placement is down.

    Attributes:
        revision: grows by one with each published table.
        reasons: why this table differs from the one before, for people.
    """

    revision: int
    made_unix_s: float
    policy: str
    routes: tuple[Route, ...] = ()
    models: tuple[ModelCard, ...] = ()
    reasons: tuple[str, ...] = ()

    def route(self, stage: Stage, model: str) -> Route | None:
        """The route of a (stage, model), None when no pool serves it."""
        for route in self.routes:
            if route.stage == stage and route.model == model:
                return route
        return None

    def model_card(self, model: str) -> ModelCard | None:
        """The card of a model that can be asked for, None when unknown."""
        for card in self.models:
            if card.model == model:
                return card
        return None


class PoolSpec(Contract, frozen=True, kw_only=True):
    """One pool as the operator declares it (input of `fleet bus apply`)."""

    stage: Stage
    pool: str
    model: str
    workers: tuple[WorkerId, ...] = ()


class FleetSpec(Contract, frozen=True, kw_only=True, tag="fleet_spec.v1"):
    """The declared fleet: pools and the worker names that may appear in them."""

    pools: tuple[PoolSpec, ...]
