"""The table of channels: address, who speaks, what is said. AsyncAPI is made from it; `subjects` builds names."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fleet_contracts.control import LeaderInfo, RoutingTable, Telemetry, WorkerInfo
from fleet_contracts.events import (
    Chunk,
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Finished,
    Progress,
    RootLost,
    Started,
    StepDone,
    TimelineQuery,
    TimelineReply,
    Token,
)
from fleet_contracts.jobs import FileRecord, JobLease, JobRecord, LineOutcome
from fleet_contracts.models import ModelSpec, ModelStatus
from fleet_contracts.tensors import SpillReply, SpillRequest
from fleet_contracts.work import Cancel, DeadLetter, JoinRecord, StepTask


@dataclass(frozen=True, slots=True)
class Channel:
    """One kind of subject or key.

    Attributes:
        address: name with `{placeholders}`, one token each.
        kind: `jetstream` (durable), `core` (at most once), `request` (core with an answer), `kv`.
        account: `work` or `control`.
        messages: what may be published; `replies` what may be answered.
    """

    name: str
    address: str
    kind: str
    account: str
    description: str
    messages: tuple[type[msgspec.Struct], ...]
    replies: tuple[type[msgspec.Struct], ...] = ()


CHANNELS: tuple[Channel, ...] = (
    Channel(
        "work",
        "fleet.work.{stage}.{pool}.{class}.{lane}",
        "jetstream",
        "work",
        "Work items between stages.",
        (StepTask,),
    ),
    Channel(
        "event",
        "fleet.event.{ingress}.{request}.{nonce}",
        "request",
        "work",
        "Events of one request; terminal ones, claims and lost roots are answered.",
        (Started, Token, Progress, Chunk, StepDone, Finished, Failed, Claim, RootLost),
        (Confirm, ClaimReply),
    ),
    Channel("cancel", "fleet.cancel", "core", "work", "A request is over for its client.", (Cancel,)),
    Channel(
        "ask",
        "fleet.ask.{ingress}",
        "request",
        "work",
        "One ingress asks another about a request.",
        (TimelineQuery,),
        (TimelineReply,),
    ),
    Channel(
        "spill",
        "fleet.tensor.{boot}.{owner}",
        "request",
        "work",
        "A reader on another host asks an arena's owner for a copy in the network store.",
        (SpillRequest,),
        (SpillReply,),
    ),
    Channel("dead", "fleet.dead.{stage}", "jetstream", "work", "Work nobody could finish.", (DeadLetter,)),
    Channel(
        "telemetry",
        "fleet.telemetry.{stage}.{worker}",
        "core",
        "control",
        "A worker's report each second.",
        (Telemetry,),
    ),
    Channel("joins", "$KV.fleet_joins.{request}.{step}", "kv", "work", "Inputs of a step so far.", (JoinRecord,)),
    Channel("tombstones", "$KV.fleet_tombstones.{request}", "kv", "work", "Cancelled requests.", (Cancel,)),
    Channel("result", "fleet.result.{job}", "core", "work", "A durable job is over.", (JobRecord,)),
    Channel(
        "jobs",
        "$KV.fleet_jobs.{kind}.{owner}.{id}",
        "kv",
        "work",
        "Files, durable jobs and who drives them.",
        (FileRecord, JobRecord, JobLease),
    ),
    Channel("lines", "$KV.fleet_lines.{job}.{line}", "kv", "work", "Outcomes of the lines of jobs.", (LineOutcome,)),
    Channel("registry", "$KV.fleet_registry.{key}", "kv", "control", "Live workers and ingresses.", (WorkerInfo,)),
    Channel("leader", "$KV.fleet_leader.placement", "kv", "control", "Who leads placement.", (LeaderInfo,)),
    Channel(
        "models",
        "$KV.fleet_models.{kind}.{model}",
        "kv",
        "control",
        "Models an operator wants served, and what became of them.",
        (ModelSpec, ModelStatus),
    ),
    Channel("routing", "$KV.fleet_routing.table", "kv", "control", "The routing table.", (RoutingTable,)),
)
