"""Every subject, stream, consumer and bucket name of the fleet (DESIGN section 5): the table AsyncAPI is made from."""

from __future__ import annotations

import base64
import re

from fleet_contracts.base import ANY_LANE, IngressId, PriorityClass, RequestId, Stage, WorkerId

CANCEL = "fleet.cancel"
TELEMETRY_ALL = "fleet.telemetry.>"
DEAD_STREAM = "FLEET_DEAD"
DEAD_ALL = "fleet.dead.>"

#: KV buckets. `joins`, `tombstones`, `jobs` and `lines` belong to the work account, the rest to the control account.
BUCKET_JOINS = "fleet_joins"
BUCKET_TOMBSTONES = "fleet_tombstones"
BUCKET_REGISTRY = "fleet_registry"
BUCKET_ROUTING = "fleet_routing"
BUCKET_LEADER = "fleet_leader"
BUCKET_MODELS = "fleet_models"
BUCKET_JOBS = "fleet_jobs"
BUCKET_LINES = "fleet_lines"

#: Object bucket of the contents of files and jobs (work account).
OBJECTS_FILES = "fleet_files"

#: Object bucket of pictures that clients were given a URL for (work account).
OBJECTS_PICTURES = "fleet_pictures"

#: The one key of the routing bucket.
ROUTING_KEY = "table"

#: What the operator wants, and what became of it: `<prefix><key of the model>` in the bucket of models.
MODEL_SPEC_PREFIX = "spec."
MODEL_STATUS_PREFIX = "status."

#: The key of the leader bucket that placement instances compete for.
LEADER_KEY = "placement"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,80}")


def _token(value: str) -> str:
    if not _TOKEN.fullmatch(value):  # match with $ would let a final newline into the protocol
        raise ValueError(f"not usable as one token of a subject: {value!r}")
    return value


def work(stage: Stage, pool: str, priority_class: PriorityClass, lane: str = ANY_LANE) -> str:
    """Subject of a work item for one pool, class and lane."""
    return f"fleet.work.{stage.value}.{_token(pool)}.{priority_class.value}.{_token(lane)}"


def work_all(stage: Stage) -> str:
    """Filter of everything a stage's stream holds."""
    return f"fleet.work.{stage.value}.>"


def work_stream(stage: Stage) -> str:
    """Name of the WorkQueue stream of a stage."""
    return f"FLEET_WORK_{stage.value.upper()}"


def work_consumer(pool: str, priority_class: PriorityClass, lane: str = ANY_LANE) -> str:
    """Name of the durable pull consumer of one pool, class and lane (within the stage's stream)."""
    return f"{_token(pool)}__{priority_class.value}__{_token(lane)}"


def worker_lane(worker_id: WorkerId) -> str:
    """Lane only `worker_id` pulls from."""
    return f"w-{_token(worker_id)}"


def event(ingress_id: IngressId, request_id: RequestId, nonce: str) -> str:
    """Subject of a request's events: made of ids and the ingress's nonce, never of a message's reply field."""
    return f"fleet.event.{_token(ingress_id)}.{_token(request_id)}.{_token(nonce)}"


def events_of(ingress_id: IngressId) -> str:
    """Filter an ingress subscribes to once, for all its requests."""
    return f"fleet.event.{_token(ingress_id)}.>"


def ask(ingress_id: IngressId) -> str:
    """Subject on which an ingress answers questions of other ingresses about its requests."""
    return f"fleet.ask.{_token(ingress_id)}"


def telemetry(stage: Stage, worker_id: WorkerId) -> str:
    """Subject of a worker's report, once a second."""
    return f"fleet.telemetry.{stage.value}.{_token(worker_id)}"


def spill(boot_id: str, segment: str) -> str:
    """Subject on which the owner of an arena segment answers requests to spill a slot to the network store."""
    return f"fleet.tensor.{_token(boot_id)}.{_token(segment)}"


def result(job_id: str) -> str:
    """Subject of the result of a durable job."""
    return f"fleet.result.{_token(job_id)}"


def dead(stage: Stage) -> str:
    """Subject of dead letters of a stage."""
    return f"fleet.dead.{stage.value}"


def model_spec_key(model: str) -> str:
    """Key of the record of what an operator wants of a model."""
    return f"{MODEL_SPEC_PREFIX}{_model_key(model)}"


def model_status_key(model: str) -> str:
    """Key of the record of what became of a model."""
    return f"{MODEL_STATUS_PREFIX}{_model_key(model)}"


def _model_key(model: str) -> str:
    """Names of models hold slashes and dots."""
    return base64.urlsafe_b64encode(model.encode()).decode()


def message_id(request_id: str, step_id: str, epoch: int) -> str:
    """`Nats-Msg-Id` of a work item: one intentional publish of a step at one epoch."""
    return f"{request_id}:{step_id}:{epoch}"
