"""The OpenAPI document, made from the very structs the routes decode and encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from fleet_ingress.api.audio import SpeechRequest, TranscriptDone, TranscriptionForm, VerboseTranscription
from fleet_ingress.api.chat import ChatRequest
from fleet_ingress.api.completions import CompletionRequest
from fleet_ingress.api.embeddings import EmbeddingList, EmbeddingRequest
from fleet_ingress.api.errors import ErrorEnvelope
from fleet_ingress.api.images import EditForm, ImageEvent, ImageRequest, ImagesReport
from fleet_ingress.api.jobs import (
    Batch,
    BatchList,
    CreateBatch,
    CreateJob,
    FileDeleted,
    FileList,
    FileObject,
    FileUpload,
    Job,
    JobList,
)
from fleet_ingress.api.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    HealthReport,
    ModelList,
    ModelReport,
)
from fleet_ingress.api.timeline import RequestReport
from fleet_ingress.api.tokenize import TokenCountReport, TokenizeRequest
from fleet_ingress.speech import CONTENT_TYPES

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as documented. `answer` None: text, or files of `answer_types`."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    request: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    request_type: str = "application/json"
    answer_types: tuple[str, ...] = ("text/plain",)


_GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503, 504)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation, pictures included.",
        ChatCompletion,
        ChatRequest,
        ChatChunk,
        _GENERATION_ERRORS,
    ),
    Operation(
        "post", "/v1/completions", "Continue a text.", Completion, CompletionRequest, Completion, _GENERATION_ERRORS
    ),
    Operation(
        "post",
        "/v1/tokenize",
        "Count the tokens of a prompt.",
        TokenCountReport,
        TokenizeRequest,
        None,
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/v1/images/generations",
        "Make pictures of a prompt.",
        ImagesReport,
        ImageRequest,
        ImageEvent,
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/v1/images/edits",
        "Change pictures as a prompt says.",
        ImagesReport,
        EditForm,
        ImageEvent,
        _GENERATION_ERRORS,
        request_type="multipart/form-data",
    ),
    Operation(
        "get",
        "/v1/images/files/{name}",
        "The file of a picture that was answered as a URL.",
        None,
        errors=(401, 404, 503),
        answer_types=("image/png", "image/jpeg", "image/webp"),
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "Make a vector of each text.",
        EmbeddingList,
        EmbeddingRequest,
        None,
        _GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/v1/audio/transcriptions",
        "Write down what is said in a file.",
        VerboseTranscription,
        TranscriptionForm,
        TranscriptDone,
        _GENERATION_ERRORS,
        request_type="multipart/form-data",
    ),
    Operation(
        "post",
        "/v1/audio/speech",
        "Read a text aloud, sent as it is made.",
        None,
        SpeechRequest,
        None,
        _GENERATION_ERRORS,
        answer_types=tuple(media_type.decode() for media_type in CONTENT_TYPES.values()),
    ),
    Operation("get", "/v1/models", "All models that can be asked for.", ModelList, errors=(401,)),
    Operation("get", "/v1/models/{model_id}", "One model.", ModelReport, errors=(401, 404)),
    Operation("get", "/v1/requests/{request_id}", "What happened to a request.", RequestReport, errors=(401, 404, 503)),
    Operation(
        "post",
        "/v1/files",
        "Keep a file.",
        FileObject,
        FileUpload,
        None,
        (400, 401, 413, 415, 429, 503),
        request_type="multipart/form-data",
    ),
    Operation("get", "/v1/files", "Files, the newest first.", FileList, errors=(400, 401, 503)),
    Operation("get", "/v1/files/{file_id}", "One file.", FileObject, errors=(401, 404, 503)),
    Operation(
        "get",
        "/v1/files/{file_id}/content",
        "What a file holds.",
        None,
        errors=(401, 404, 503),
        answer_types=("application/octet-stream",),
    ),
    Operation("delete", "/v1/files/{file_id}", "Forget a file.", FileDeleted, errors=(401, 404, 503)),
    Operation(
        "post",
        "/v1/batches",
        "Run every line of a file.",
        Batch,
        CreateBatch,
        None,
        (400, 401, 404, 413, 415, 429, 503),
    ),
    Operation("get", "/v1/batches", "Batches, the newest first.", BatchList, errors=(400, 401, 503)),
    Operation("get", "/v1/batches/{batch_id}", "One batch.", Batch, errors=(401, 404, 503)),
    Operation("post", "/v1/batches/{batch_id}/cancel", "Stop a batch.", Batch, errors=(401, 404, 409, 503)),
    Operation(
        "post", "/v1/jobs", "Run one request as a durable job.", Job, CreateJob, None, (400, 401, 413, 415, 429, 503)
    ),
    Operation("get", "/v1/jobs", "Jobs, the newest first.", JobList, errors=(400, 401, 503)),
    Operation("get", "/v1/jobs/{job_id}", "One job.", Job, errors=(401, 404, 503)),
    Operation(
        "get",
        "/v1/jobs/{job_id}/result",
        "What the request was answered, with its status.",
        None,
        errors=(401, 404, 409, 503),
        answer_types=("application/octet-stream",),
    ),
    Operation("post", "/v1/jobs/{job_id}/cancel", "Stop a job.", Job, errors=(401, 404, 409, 503)),
    Operation("get", "/health/live", "The process runs.", HealthReport),
    Operation("get", "/health/ready", "New work is welcome.", HealthReport, errors=(503,)),
    Operation("get", "/metrics", "Prometheus metrics.", None, errors=(401,)),
)


def make_openapi() -> dict[str, object]:
    """The document as plain JSON values, in a stable order."""
    types: set[type[msgspec.Struct]] = {
        kind for op in OPERATIONS for kind in (op.answer, op.request, op.event) if kind is not None
    }
    types.add(ErrorEnvelope)
    ordered = sorted(types, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    by_type: dict[type[Any], dict[str, Any]] = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Omnifleet", "version": "1", "description": "OpenAI-compatible API of an Omnifleet ingress."},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _file_schema(media_type: str) -> dict[str, str]:
    return {"type": "string"} if media_type.startswith("text/") else {"type": "string", "format": "binary"}


def _operation(operation: Operation, schemas: dict[type[Any], dict[str, Any]]) -> dict[str, object]:
    content: dict[str, object] = {name: {"schema": _file_schema(name)} for name in operation.answer_types}
    if operation.answer is not None:
        content = {"application/json": {"schema": schemas[operation.answer]}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": schemas[operation.event]}
    responses: dict[str, object] = {"200": {"description": "OK", "content": content}}
    for status in operation.errors:
        envelope = {"application/json": {"schema": schemas[ErrorEnvelope]}}
        responses[str(status)] = {"description": "See `error.code`.", "content": envelope}
    document: dict[str, object] = {"summary": operation.summary, "responses": responses}
    if operation.request is not None:
        body = {operation.request_type: {"schema": schemas[operation.request]}}
        document["requestBody"] = {"required": True, "content": body}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        document["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return document
