"""Streams, consumers and buckets of the fleet as a table: what `fleet bus apply` makes and services verify. Pure.

Configurations are those of the JetStream API (durations in nanoseconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fleet_contracts import subjects
from fleet_contracts.base import ANY_LANE, PriorityClass, Stage
from fleet_contracts.control import FleetSpec, PoolSpec

_NS = 1_000_000_000
_DAY_S = 86_400.0

ADVISORY_STREAM = "FLEET_ADVISORIES"
ADVISORY_CONSUMER = "mover"
_MAX_DELIVERIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
#: Time the mover has for one dead item before the broker tells it again.
_ADVISORY_ACK_WAIT_S = 30.0
#: How long the broker keeps the marker that tells watchers of an expiry.
_MARKER_TTL_S = 60.0
#: Longest life of files, jobs and their results.
DURABLE_S = 30 * _DAY_S
#: Default life of registry entries and of the leader's lease.
LEASE_S = 4.0


class Account(StrEnum):
    """The two accounts of the broker: a worker's reach in one is nothing in the other."""

    WORK = "WORK"
    CONTROL = "CONTROL"


@dataclass(frozen=True, slots=True)
class TopologyLimits:
    """What an operator may change.

    Attributes:
        max_msgs, max_bytes: per work stream; at either the stream refuses (QueueFullError).
        max_age_s: longest life of a work item, whatever its own TTL.
    """

    max_msgs: int = 50_000
    max_bytes: int = 256 << 20
    max_age_s: float = _DAY_S
    duplicate_window_s: float = 120.0
    ack_wait_s: float = 6.0
    max_deliver: int = 5
    max_ack_pending: int = 10_000
    dead_max_msgs: int = 10_000
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream as it must be. Fields not in `config` are the broker's defaults."""

    account: Account
    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer as it must be."""

    stream: str
    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A bucket.

    Attributes:
        default_ttl_s: life of a key written without `ttl_s`; None: for ever.
        max_age_s: longest life of any key; None: a day, or for ever where keys are kept for ever.
        is_durable: what clients left there outlives the stack.
    """

    name: str
    account: Account
    default_ttl_s: float | None
    max_bytes: int = 64 << 20
    max_age_s: float | None = None
    is_durable: bool = False

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    @property
    def subjects(self) -> str:
        return f"$KV.{self.name}.>"

    @property
    def changes(self) -> str:
        """Core subjects on which the broker repeats every stored change, expiries included."""
        return f"fleet.kv.{self.name}.>"


@dataclass(frozen=True, slots=True)
class ObjectBucketSpec:
    """A bucket of objects, laid out as NATS's own tools read it: chunks, and one description per object.

    Attributes:
        default_ttl_s: life of an object stored without `ttl_s`; no object lives longer.
    """

    name: str
    account: Account
    default_ttl_s: float
    max_bytes: int

    @property
    def stream(self) -> str:
        return f"OBJ_{self.name}"

    @property
    def subjects(self) -> tuple[str, str]:
        """Of the chunks, and of the descriptions."""
        return f"$O.{self.name}.C.>", f"$O.{self.name}.M.>"


BUCKETS: tuple[BucketSpec, ...] = (
    BucketSpec(subjects.BUCKET_JOINS, Account.WORK, _DAY_S),
    BucketSpec(subjects.BUCKET_TOMBSTONES, Account.WORK, _DAY_S),
    BucketSpec(subjects.BUCKET_REGISTRY, Account.CONTROL, LEASE_S),
    BucketSpec(subjects.BUCKET_ROUTING, Account.CONTROL, None),
    BucketSpec(subjects.BUCKET_LEADER, Account.CONTROL, LEASE_S),
    BucketSpec(subjects.BUCKET_MODELS, Account.CONTROL, None),
    BucketSpec(
        subjects.BUCKET_JOBS, Account.WORK, DURABLE_S, max_bytes=256 << 20, max_age_s=DURABLE_S, is_durable=True
    ),
    BucketSpec(subjects.BUCKET_LINES, Account.WORK, DURABLE_S, max_bytes=1 << 30, max_age_s=DURABLE_S, is_durable=True),
)
OBJECT_BUCKETS: tuple[ObjectBucketSpec, ...] = (
    ObjectBucketSpec(subjects.OBJECTS_FILES, Account.WORK, DURABLE_S, max_bytes=2 << 30),
    # A bucket of their own: however many there are, batches find room for their results.
    ObjectBucketSpec(subjects.OBJECTS_PICTURES, Account.WORK, _DAY_S, max_bytes=1 << 30),
)

_CONTROL_PREFIXES = ("fleet.telemetry.", *(b.changes[:-1] for b in BUCKETS if b.account is Account.CONTROL))


def bucket(name: str) -> BucketSpec:
    """The bucket of that name; KeyError when the fleet has none."""
    for spec in BUCKETS:
        if spec.name == name:
            return spec
    raise KeyError(name)


def object_bucket(name: str) -> ObjectBucketSpec:
    """The object bucket of that name; KeyError when the fleet has none."""
    for spec in OBJECT_BUCKETS:
        if spec.name == name:
            return spec
    raise KeyError(name)


def durable_streams() -> frozenset[str]:
    """Streams of what clients left for later; the others hold the work of one stack's life."""
    return frozenset(b.stream for b in BUCKETS if b.is_durable) | {b.stream for b in OBJECT_BUCKETS}


def account_of(subject: str) -> Account:
    """The account a core subject or filter belongs to."""
    return Account.CONTROL if subject.startswith(_CONTROL_PREFIXES) else Account.WORK


def streams(limits: TopologyLimits) -> tuple[StreamSpec, ...]:
    """Every stream, buckets included."""
    work = tuple(StreamSpec(Account.WORK, subjects.work_stream(stage), _work_config(stage, limits)) for stage in Stage)
    own = (
        StreamSpec(Account.WORK, subjects.DEAD_STREAM, _dead_config(limits)),
        StreamSpec(Account.WORK, ADVISORY_STREAM, _advisory_config(limits)),
    )
    buckets = tuple(StreamSpec(b.account, b.stream, _bucket_config(b, limits)) for b in BUCKETS)
    objects = tuple(StreamSpec(b.account, b.stream, _object_config(b, limits)) for b in OBJECT_BUCKETS)
    return work + own + buckets + objects


def pool_consumers(pool: PoolSpec, limits: TopologyLimits) -> tuple[ConsumerSpec, ...]:
    """One consumer per class and lane of a pool."""
    lanes = (ANY_LANE, *(subjects.worker_lane(worker) for worker in pool.workers))
    return tuple(
        consumer(pool.stage, pool.pool, priority_class, lane, limits)
        for priority_class in PriorityClass
        for lane in lanes
    )


def consumers(spec: FleetSpec, stage: Stage, limits: TopologyLimits) -> tuple[ConsumerSpec, ...]:
    """Every consumer of a stage's stream."""
    return tuple(item for pool in spec.pools if pool.stage == stage for item in pool_consumers(pool, limits))


def consumer(stage: Stage, pool: str, priority_class: PriorityClass, lane: str, limits: TopologyLimits) -> ConsumerSpec:
    """The durable pull consumer of one pool, class and lane."""
    name = subjects.work_consumer(pool, priority_class, lane)
    return ConsumerSpec(
        subjects.work_stream(stage),
        name,
        {
            "durable_name": name,
            "filter_subject": subjects.work(stage, pool, priority_class, lane),
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_wait": _ns(limits.ack_wait_s),
            "max_deliver": limits.max_deliver,
            "max_ack_pending": limits.max_ack_pending,
            "max_waiting": 2048,
            "num_replicas": limits.num_replicas,
        },
    )


def advisory_consumer(limits: TopologyLimits) -> ConsumerSpec:
    """Durable, so that the mover hears of items that died while nobody listened."""
    return ConsumerSpec(
        ADVISORY_STREAM,
        ADVISORY_CONSUMER,
        {
            "durable_name": ADVISORY_CONSUMER,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_wait": _ns(_ADVISORY_ACK_WAIT_S),
            "max_deliver": -1,
            "num_replicas": limits.num_replicas,
        },
    )


def parse_consumer(name: str) -> tuple[str, PriorityClass, str] | None:
    """(pool, class, lane) of a consumer's name, None when it is none of ours."""
    for priority_class in PriorityClass:
        pool, separator, lane = name.partition(f"__{priority_class.value}__")
        if separator and pool and lane:
            return pool, priority_class, lane
    return None


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Fields of `wanted` that `found` has otherwise; the broker leaves out empty ones."""
    return [
        f"{key}: {found.get(key)!r} instead of {value!r}"
        for key, value in wanted.items()
        if (found.get(key) or None) != (value or None)
    ]


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _base_config(name: str, stream_subjects: list[str], limits: TopologyLimits) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": stream_subjects,
        "storage": "file",
        "num_replicas": limits.num_replicas,
        "max_consumers": -1,
        "max_msgs_per_subject": -1,
    }


def _work_config(stage: Stage, limits: TopologyLimits) -> dict[str, Any]:
    return {
        **_base_config(subjects.work_stream(stage), [subjects.work_all(stage)], limits),
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": limits.max_msgs,
        "max_bytes": limits.max_bytes,
        "max_age": _ns(limits.max_age_s),
        "duplicate_window": _ns(limits.duplicate_window_s),
        "allow_msg_ttl": True,
    }


def _dead_config(limits: TopologyLimits) -> dict[str, Any]:
    return {
        **_base_config(subjects.DEAD_STREAM, [subjects.DEAD_ALL], limits),
        "retention": "limits",
        "discard": "old",
        "max_msgs": limits.dead_max_msgs,
        "max_bytes": limits.max_bytes,
        "max_age": _ns(7 * _DAY_S),
    }


def _advisory_config(limits: TopologyLimits) -> dict[str, Any]:
    filters = [f"{_MAX_DELIVERIES}.{subjects.work_stream(stage)}.*" for stage in Stage]
    return {
        **_base_config(ADVISORY_STREAM, filters, limits),
        "retention": "workqueue",
        "discard": "old",
        "max_msgs": limits.max_msgs,
        "max_bytes": 64 << 20,
        "max_age": _ns(limits.max_age_s),
    }


def _bucket_config(spec: BucketSpec, limits: TopologyLimits) -> dict[str, Any]:
    return {
        **_base_config(spec.stream, [spec.subjects], limits),
        "retention": "limits",
        "discard": "new",
        "max_msgs": -1,
        "max_bytes": spec.max_bytes,
        "max_msgs_per_subject": 1,
        "max_age": 0 if spec.default_ttl_s is None else _ns(spec.max_age_s or _DAY_S),
        "duplicate_window": _ns(2.0),
        "allow_msg_ttl": True,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "subject_delete_marker_ttl": _ns(_MARKER_TTL_S),
        # Watches go blind after a reconnect; a core subscription to these copies does not.
        "republish": {"src": spec.subjects, "dest": spec.changes},
    }


def _object_config(spec: ObjectBucketSpec, limits: TopologyLimits) -> dict[str, Any]:
    return {
        **_base_config(spec.stream, list(spec.subjects), limits),
        "retention": "limits",
        "discard": "new",
        "max_msgs": -1,
        "max_bytes": spec.max_bytes,
        "max_age": _ns(spec.default_ttl_s),
        # A chunk whose acknowledgement was lost is sent again under its own id.
        "duplicate_window": _ns(limits.duplicate_window_s),
        "allow_msg_ttl": True,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
    }
