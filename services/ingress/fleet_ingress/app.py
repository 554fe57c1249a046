"""The HTTP application: routes, error handlers, and the edge around them."""

from __future__ import annotations

import functools
from typing import cast

import structlog
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, ControllerRouterHandler, HTTPScope, Receive, Scope, Send

from fleet_ingress.context import INGRESS_KEY, Ingress
from fleet_ingress.edge import Edge
from fleet_ingress.errors import ApiError, by_status
from fleet_ingress.routes.audio import create_speech, create_transcription
from fleet_ingress.routes.batches import (
    cancel_batch,
    cancel_job,
    create_batch,
    create_job,
    get_batch,
    get_job,
    get_job_result,
    list_batches,
    list_jobs,
)
from fleet_ingress.routes.chat import create_chat_completion
from fleet_ingress.routes.files import delete_file, get_file, get_file_content, list_files, upload_file
from fleet_ingress.routes.generation import count_tokens, create_completion, create_embeddings
from fleet_ingress.routes.health import get_live, get_metrics, get_ready
from fleet_ingress.routes.images import create_edits, create_images, get_picture
from fleet_ingress.routes.models import get_model, list_models
from fleet_ingress.routes.openapi import make_openapi
from fleet_ingress.routes.requests import get_request

log = structlog.get_logger(__name__)

ROUTES: tuple[ControllerRouterHandler, ...] = (
    create_chat_completion,
    create_completion,
    count_tokens,
    create_images,
    create_edits,
    get_picture,
    create_speech,
    create_transcription,
    create_embeddings,
    list_models,
    get_model,
    get_request,
    upload_file,
    list_files,
    get_file,
    get_file_content,
    delete_file,
    create_batch,
    list_batches,
    get_batch,
    cancel_batch,
    create_job,
    list_jobs,
    get_job,
    get_job_result,
    cancel_job,
    get_live,
    get_ready,
    get_metrics,
)


@functools.cache
def routes() -> Litestar:
    """The routes, for every ingress of this process: making them takes 30 ms, and they keep nothing."""
    return Litestar(
        route_handlers=ROUTES,
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_exception, Exception: _on_exception},
        openapi_config=None,
        logging_config=None,
        # Bodies are read by the routes themselves, under the operator's limit.
        request_max_body_size=None,
    )


def bind(ingress: Ingress) -> ASGIApp:
    """The routes of one ingress, without the edge."""
    app = routes()

    async def call(any_scope: Scope, receive: Receive, send: Send) -> None:
        scope = cast("HTTPScope", any_scope)
        scope["state"][INGRESS_KEY] = ingress
        await app(scope, receive, send)

    return call


def route_paths() -> frozenset[str]:
    """What is served."""
    return frozenset(route.path for route in routes().routes)


def create_asgi(ingress: Ingress) -> ASGIApp:
    """What the HTTP server serves: the application behind the edge."""
    return Edge(bind(ingress), ingress.settings)


def openapi_schema() -> dict[str, object]:
    """The OpenAPI document of all routes."""
    return make_openapi()


def _on_api_error(_request: Request[None, None, State], err: ApiError) -> Response[bytes]:
    headers = {name.decode(): value.decode() for name, value in err.headers() if name != b"content-type"}
    return Response(err.envelope, status_code=err.status, headers=headers, media_type="application/json")


def _on_http_exception(request: Request[None, None, State], err: HTTPException) -> Response[bytes]:
    answer = _on_api_error(request, by_status(err.status_code))
    allow = (err.headers or {}).get("allow")
    if allow is not None:
        answer.headers["allow"] = allow
    return answer


def _on_exception(request: Request[None, None, State], err: Exception) -> Response[bytes]:
    log.error("request_crashed", path=request.scope["path"][:200], exc_info=err)
    return _on_api_error(request, by_status(500))
