"""MessagePack encoders and decoders, one per message kind."""

from __future__ import annotations

from typing import get_args

import msgspec

from fleet_contracts.audio import TranscriptPart
from fleet_contracts.control import IngressInfo, LeaderInfo, RoutingTable, Telemetry, WorkerInfo
from fleet_contracts.events import IngressReply, TimelineQuery, TimelineReply, WorkerMessage
from fleet_contracts.jobs import FileRecord, JobLease, JobRecord, LineOutcome
from fleet_contracts.models import ModelSpec, ModelStatus
from fleet_contracts.preprocess import EditFiles
from fleet_contracts.work import Cancel, DeadLetter, JoinRecord, StepParams, StepTask, TaskHead

_encoder = msgspec.msgpack.Encoder()

_task = msgspec.msgpack.Decoder(StepTask)
_task_head = msgspec.msgpack.Decoder(TaskHead)
_worker_message: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_ingress_reply: msgspec.msgpack.Decoder[IngressReply] = msgspec.msgpack.Decoder(IngressReply)
_join = msgspec.msgpack.Decoder(JoinRecord)
_cancel = msgspec.msgpack.Decoder(Cancel)
_dead = msgspec.msgpack.Decoder(DeadLetter)
_table = msgspec.msgpack.Decoder(RoutingTable)
_telemetry = msgspec.msgpack.Decoder(Telemetry)
_leader = msgspec.msgpack.Decoder(LeaderInfo)
_registry: msgspec.msgpack.Decoder[WorkerInfo | IngressInfo] = msgspec.msgpack.Decoder(WorkerInfo | IngressInfo)
_model: msgspec.msgpack.Decoder[ModelSpec | ModelStatus] = msgspec.msgpack.Decoder(ModelSpec | ModelStatus)
_timeline_query = msgspec.msgpack.Decoder(TimelineQuery)
_timeline_reply = msgspec.msgpack.Decoder(TimelineReply)
_transcript_part: msgspec.msgpack.Decoder[TranscriptPart] = msgspec.msgpack.Decoder(TranscriptPart)
_file_record = msgspec.msgpack.Decoder(FileRecord)
_job_record = msgspec.msgpack.Decoder(JobRecord)
_job_lease = msgspec.msgpack.Decoder(JobLease)
_line_outcome = msgspec.msgpack.Decoder(LineOutcome)
_edit_files = msgspec.msgpack.Decoder(EditFiles)

#: Raised by every decoder for bytes that are not the message asked for.
DecodeError = msgspec.DecodeError


#: What this release can read of work: announced by its workers (`WorkerInfo.accepted_tags`).
ACCEPTED_TAGS = tuple(str(struct.__struct_config__.tag) for struct in (StepTask, *get_args(StepParams)))


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of any contract struct."""
    return _encoder.encode(message)


decode_task = _task.decode
decode_task_head = _task_head.decode
decode_worker_message = _worker_message.decode
decode_ingress_reply = _ingress_reply.decode
decode_join = _join.decode
decode_cancel = _cancel.decode
decode_dead_letter = _dead.decode
decode_table = _table.decode
decode_leader = _leader.decode
decode_telemetry = _telemetry.decode
decode_registry_entry = _registry.decode
decode_model_record = _model.decode
decode_timeline_query = _timeline_query.decode
decode_timeline_reply = _timeline_reply.decode
decode_transcript_part = _transcript_part.decode
decode_file_record = _file_record.decode
decode_job_record = _job_record.decode
decode_job_lease = _job_lease.decode
decode_line_outcome = _line_outcome.decode
decode_edit_files = _edit_files.decode
