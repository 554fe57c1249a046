"""Configuration text of a nats-server for the fleet: loopback, JetStream, two accounts, one user per role.

What a role may publish and hear follows from the table of subjects. Streams and consumers are made by `admin` only.
A pull's reply subject can write anywhere within its account (SUBSTRATE 1f): that is why routing, registry and leader
live in another account than work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fleet_common.bus import topology
from fleet_common.bus.topology import Account, BucketSpec, ObjectBucketSpec
from fleet_contracts import subjects
from fleet_contracts.base import Stage


class Role(StrEnum):
    """Users of the broker: `<role>` in the work account, `<role>_control` in the control account."""

    WORKER = "worker"
    INGRESS = "ingress"
    PLACEMENT = "placement"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Passwords:
    """Random passwords per role, one set per account."""

    work: Mapping[Role, str]
    control: Mapping[Role, str]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens and keeps its data.

    Attributes:
        monitor_port: loopback port of the HTTP monitoring, None: off.
    """

    port: int
    store_dir: Path
    host: str = "127.0.0.1"
    monitor_port: int | None = None
    max_file_bytes: int = 8 << 30
    server_name: str = "omnifleet"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Allow lists of one user. `may_answer`: may publish to the reply subject of what it heard, once each."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool = False


def render(options: ServerOptions, passwords: Passwords) -> str:
    """The text of nats.conf; it holds passwords: write it with mode 0600."""
    monitoring = [f"http: {options.host}:{options.monitor_port}"] if options.monitor_port is not None else []
    lines = [
        f"server_name: {_quoted(options.server_name)}",
        f"listen: {_quoted(f'{options.host}:{options.port}')}",
        *monitoring,
        "max_payload: 1MB",
        "max_pending: 128MB",
        "ping_interval: 20s",
        f"jetstream {{ store_dir: {_quoted(str(options.store_dir))}, max_file_store: {options.max_file_bytes} }}",
        "accounts {",
        *_account(Account.WORK, passwords.work, ""),
        *_account(Account.CONTROL, passwords.control, "_control"),
        "}",
    ]
    return "\n".join(lines) + "\n"


def permissions(account: Account, role: Role) -> Permissions:
    """What a role may do in an account."""
    if role is Role.ADMIN:
        return Permissions((">",), (">",))
    user = role.value if account is Account.WORK else f"{role.value}_control"
    own = {
        (Account.WORK, Role.WORKER): _worker,
        (Account.WORK, Role.INGRESS): _ingress,
        (Account.WORK, Role.PLACEMENT): _placement,
        (Account.CONTROL, Role.WORKER): _worker_control,
        (Account.CONTROL, Role.INGRESS): _ingress_control,
        (Account.CONTROL, Role.PLACEMENT): _placement_control,
    }[(account, role)]()
    return Permissions(own.publish, (f"_INBOX_{user}.>", *own.subscribe), own.may_answer)


def _worker() -> Permissions:
    joins, tombstones = topology.bucket(subjects.BUCKET_JOINS), topology.bucket(subjects.BUCKET_TOMBSTONES)
    return Permissions(
        publish=(
            *_publish_work(),
            *_consume_work(),
            "fleet.event.>",
            "fleet.tensor.>",
            subjects.DEAD_ALL,
            joins.subjects,
            *_read(joins),
            *_read(tombstones),
        ),
        subscribe=(subjects.CANCEL, "fleet.tensor.>", joins.changes, tombstones.changes),
        may_answer=True,
    )


def _ingress() -> Permissions:
    tombstones = topology.bucket(subjects.BUCKET_TOMBSTONES)
    jobs, lines = topology.bucket(subjects.BUCKET_JOBS), topology.bucket(subjects.BUCKET_LINES)
    return Permissions(
        publish=(
            *_publish_work(),
            jobs.subjects,
            *_read(jobs),
            lines.subjects,
            *_read(lines),
            f"$JS.API.STREAM.PURGE.{lines.stream}",
            *_objects(topology.object_bucket(subjects.OBJECTS_FILES)),
            *_objects(topology.object_bucket(subjects.OBJECTS_PICTURES)),
            "fleet.ask.>",
            "fleet.tensor.>",
            "fleet.result.>",
            subjects.CANCEL,
            tombstones.subjects,
            *_read(tombstones),
        ),
        subscribe=(
            "fleet.event.>",
            "fleet.ask.>",
            "fleet.tensor.>",
            "fleet.result.>",
            subjects.CANCEL,
            tombstones.changes,
            jobs.changes,
        ),
        may_answer=True,
    )


def _placement() -> Permissions:
    tombstones = topology.bucket(subjects.BUCKET_TOMBSTONES)
    advisories = topology.ADVISORY_STREAM
    move = tuple(
        f"$JS.API.{verb}.{subjects.work_stream(stage)}"
        for verb in ("STREAM.MSG.GET", "STREAM.MSG.DELETE", "CONSUMER.LIST")
        for stage in Stage
    )
    return Permissions(
        publish=(
            *_publish_work(),
            *_consume_work(),
            *move,
            f"$JS.API.CONSUMER.INFO.{advisories}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{advisories}.*",
            f"$JS.ACK.{advisories}.>",
            "fleet.event.>",
            subjects.DEAD_ALL,
            *_read(tombstones),
        ),
        subscribe=(tombstones.changes,),
    )


def _worker_control() -> Permissions:
    registry, routing = topology.bucket(subjects.BUCKET_REGISTRY), topology.bucket(subjects.BUCKET_ROUTING)
    return Permissions(
        publish=("fleet.telemetry.>", f"$KV.{registry.name}.worker.>", *_read(registry), *_read(routing)),
        subscribe=(registry.changes, routing.changes),
    )


def _ingress_control() -> Permissions:
    registry, routing = topology.bucket(subjects.BUCKET_REGISTRY), topology.bucket(subjects.BUCKET_ROUTING)
    models = topology.bucket(subjects.BUCKET_MODELS)
    return Permissions(
        publish=(f"$KV.{registry.name}.ingress.>", *_read(registry), *_read(routing), *_read(models)),
        subscribe=(subjects.TELEMETRY_ALL, registry.changes, routing.changes, models.changes),
    )


def _placement_control() -> Permissions:
    written = (subjects.BUCKET_ROUTING, subjects.BUCKET_LEADER)
    buckets = [topology.bucket(b) for b in (subjects.BUCKET_REGISTRY, subjects.BUCKET_MODELS, *written)]
    writable = tuple(bucket.subjects for bucket in buckets if bucket.name in written)
    return Permissions(
        publish=(*writable, *(subject for bucket in buckets for subject in _read(bucket))),
        subscribe=(subjects.TELEMETRY_ALL, *(bucket.changes for bucket in buckets)),
    )


def _publish_work() -> tuple[str, ...]:
    """Work of any stage, and the size of its stream."""
    return tuple(subjects.work_all(stage) for stage in Stage) + tuple(
        f"$JS.API.STREAM.INFO.{subjects.work_stream(stage)}" for stage in Stage
    )


def _consume_work() -> tuple[str, ...]:
    return tuple(
        subject
        for stage in Stage
        for subject in (
            f"$JS.API.CONSUMER.INFO.{subjects.work_stream(stage)}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{subjects.work_stream(stage)}.*",
            f"$JS.ACK.{subjects.work_stream(stage)}.>",
        )
    )


def _objects(bucket: ObjectBucketSpec) -> tuple[str, ...]:
    return (*bucket.subjects, *_read(bucket), f"$JS.API.STREAM.PURGE.{bucket.stream}")


def _read(bucket: BucketSpec | ObjectBucketSpec) -> tuple[str, ...]:
    direct = f"$JS.API.DIRECT.GET.{bucket.stream}"
    return (f"$JS.API.STREAM.INFO.{bucket.stream}", direct, f"{direct}.>")


def _account(account: Account, passwords: Mapping[Role, str], suffix: str) -> list[str]:
    lines = [f"  {account.value} {{", "    jetstream: enabled", "    users: ["]
    for role in Role:
        granted = permissions(account, role)
        lines += [
            f"      {{ user: {_quoted(role.value + suffix)}, password: {_quoted(passwords[role])}, permissions: {{",
            f"          publish: {{ allow: {json.dumps(granted.publish)} }}",
            f"          subscribe: {{ allow: {json.dumps(granted.subscribe)} }}",
            *(['          allow_responses: { max: 1, expires: "2m" }'] if granted.may_answer else []),
            "      } }",
        ]
    return [*lines, "    ]", "  }"]


def _quoted(text: str) -> str:
    return json.dumps(text)
