"""`/v1/batches` and `/v1/jobs`: requests that outlive every service."""

from __future__ import annotations

import msgspec
from litestar import Request, Response, get, post
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.types import ASGIApp, HTTPScope

from fleet_common.errors import FleetError
from fleet_ingress.api.decode import decode_request
from fleet_ingress.api.jobs import Batch, BatchList, CreateBatch, CreateJob, Job, JobList
from fleet_ingress.context import TENANT_KEY, ingress_of
from fleet_ingress.core.job_pages import DEFAULT_JOBS_PAGE, PageQuery, parse_page, show_batch, show_job, take_page
from fleet_ingress.core.job_state import BATCH, JOB
from fleet_ingress.errors import from_fleet_error
from fleet_ingress.jobs.desk import JobDesk
from fleet_ingress.routes.body import with_body

_BATCH_BODY_BYTES = 64 << 10


@post("/v1/batches", status_code=200)
async def create_batch(request: Request[None, None, State]) -> ASGIApp:
    """Run every line of a file."""
    ingress = ingress_of(request.scope)

    async def handle(tenant: str, _: HTTPScope, body: bytes) -> Batch:
        return show_batch(await ingress.jobs.create_batch(tenant, decode_request(body, CreateBatch)))

    return with_body(ingress, handle, _BATCH_BODY_BYTES)


@get("/v1/batches")
async def list_batches(request: Request[None, None, State]) -> Response[bytes]:
    """Batches of the tenant, the newest first."""
    tenant, desk = _asked(request)
    try:
        page = _page(request)
        items, has_more = take_page([show_batch(record) for record in await desk.jobs(tenant, BATCH)], page)
    except FleetError as err:
        raise from_fleet_error(err) from err
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return _json(BatchList(data=items, first_id=first, last_id=last, has_more=has_more))


@get("/v1/batches/{batch_id:str}")
async def get_batch(request: Request[None, None, State], batch_id: FromPath[str]) -> Response[bytes]:
    """One batch."""
    tenant, desk = _asked(request)
    try:
        return _json(show_batch(await desk.job(tenant, batch_id, BATCH)))
    except FleetError as err:
        raise from_fleet_error(err) from err


@post("/v1/batches/{batch_id:str}/cancel", status_code=200)
async def cancel_batch(request: Request[None, None, State], batch_id: FromPath[str]) -> Response[bytes]:
    """Stop a batch; what is done already is kept."""
    tenant, desk = _asked(request)
    try:
        return _json(show_batch(await desk.cancel(tenant, batch_id, BATCH)))
    except FleetError as err:
        raise from_fleet_error(err) from err


@post("/v1/jobs", status_code=200)
async def create_job(request: Request[None, None, State]) -> ASGIApp:
    """Run one request as a job."""
    ingress = ingress_of(request.scope)

    async def handle(tenant: str, _: HTTPScope, body: bytes) -> Job:
        wanted = decode_request(body, CreateJob)
        return show_job(await ingress.jobs.create_job(tenant, wanted, msgspec.json.encode(wanted.body)))

    return with_body(ingress, handle, ingress.settings.max_body_bytes)


@get("/v1/jobs")
async def list_jobs(request: Request[None, None, State]) -> Response[bytes]:
    """Jobs of the tenant, the newest first."""
    tenant, desk = _asked(request)
    try:
        page = _page(request)
        items, has_more = take_page([show_job(record) for record in await desk.jobs(tenant, JOB)], page)
    except FleetError as err:
        raise from_fleet_error(err) from err
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return _json(JobList(data=items, first_id=first, last_id=last, has_more=has_more))


@get("/v1/jobs/{job_id:str}")
async def get_job(request: Request[None, None, State], job_id: FromPath[str]) -> Response[bytes]:
    """One job."""
    tenant, desk = _asked(request)
    try:
        return _json(show_job(await desk.job(tenant, job_id, JOB)))
    except FleetError as err:
        raise from_fleet_error(err) from err


@get("/v1/jobs/{job_id:str}/result")
async def get_job_result(request: Request[None, None, State], job_id: FromPath[str]) -> Response[bytes]:
    """What the request was answered, with the very status and body."""
    tenant, desk = _asked(request)
    try:
        outcome = await desk.result(tenant, job_id)
    except FleetError as err:
        raise from_fleet_error(err) from err
    return Response(outcome.body, status_code=outcome.status, media_type=outcome.content_type)


@post("/v1/jobs/{job_id:str}/cancel", status_code=200)
async def cancel_job(request: Request[None, None, State], job_id: FromPath[str]) -> Response[bytes]:
    """Stop a job."""
    tenant, desk = _asked(request)
    try:
        return _json(show_job(await desk.cancel(tenant, job_id, JOB)))
    except FleetError as err:
        raise from_fleet_error(err) from err


def _asked(request: Request[None, None, State]) -> tuple[str, JobDesk]:
    return request.scope["state"][TENANT_KEY], ingress_of(request.scope).jobs


def _page(request: Request[None, None, State]) -> PageQuery:
    query = request.query_params
    return parse_page(query.get("limit"), query.get("after"), query.get("order"), DEFAULT_JOBS_PAGE)


def _json(answer: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")
