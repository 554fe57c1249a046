"""`/v1/files`: what batches read and write."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State, UploadFile
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.types import ASGIApp, HTTPReceiveMessage, HTTPScope

from fleet_common.errors import FleetError, InvalidInputError
from fleet_ingress.api.jobs import FileDeleted, FileList, FileObject
from fleet_ingress.context import TENANT_KEY, ingress_of
from fleet_ingress.core.job_pages import DEFAULT_FILES_PAGE, parse_page, show_file, take_page
from fleet_ingress.errors import by_status, from_fleet_error
from fleet_ingress.jobs.desk import JobDesk, Upload, parse_expiry
from fleet_ingress.routes.body import with_body

#: What a form is longer than its file.
_FORM_BYTES = 64 << 10


@post("/v1/files", status_code=200)
async def upload_file(request: Request[None, None, State]) -> ASGIApp:
    """Keep a file: multipart, `file` and `purpose`."""
    ingress = ingress_of(request.scope)

    async def handle(tenant: str, scope: HTTPScope, body: bytes) -> FileObject:
        return show_file(await ingress.jobs.add_file(tenant, await _parse_form(scope, body)))

    return with_body(ingress, handle, ingress.settings.max_file_bytes + _FORM_BYTES, is_json=False)


@get("/v1/files")
async def list_files(request: Request[None, None, State]) -> Response[bytes]:
    """Files of the tenant, the newest first."""
    tenant, desk = _asked(request)
    query = request.query_params
    try:
        page = parse_page(query.get("limit"), query.get("after"), query.get("order"), DEFAULT_FILES_PAGE)
        records = await desk.files(tenant, query.get("purpose"))
        items, has_more = take_page([show_file(record) for record in records], page)
    except FleetError as err:
        raise from_fleet_error(err) from err
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return _json(FileList(data=items, first_id=first, last_id=last, has_more=has_more))


@get("/v1/files/{file_id:str}")
async def get_file(request: Request[None, None, State], file_id: FromPath[str]) -> Response[bytes]:
    """One file, without its content."""
    tenant, desk = _asked(request)
    try:
        return _json(show_file(await desk.file(tenant, file_id)))
    except FleetError as err:
        raise from_fleet_error(err) from err


@get("/v1/files/{file_id:str}/content")
async def get_file_content(request: Request[None, None, State], file_id: FromPath[str]) -> Response[bytes]:
    """What a file holds."""
    tenant, desk = _asked(request)
    try:
        record, content = await desk.content(tenant, file_id)
    except FleetError as err:
        raise from_fleet_error(err) from err
    # Whatever a client left here, a browser must not run it.
    headers = {
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return Response(content, media_type="application/octet-stream", headers=headers)


@delete("/v1/files/{file_id:str}", status_code=200)
async def delete_file(request: Request[None, None, State], file_id: FromPath[str]) -> Response[bytes]:
    """Forget a file."""
    tenant, desk = _asked(request)
    try:
        await desk.delete_file(tenant, file_id)
    except FleetError as err:
        raise from_fleet_error(err) from err
    return _json(FileDeleted(id=file_id))


def _asked(request: Request[None, None, State]) -> tuple[str, JobDesk]:
    return request.scope["state"][TENANT_KEY], ingress_of(request.scope).jobs


def _json(answer: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _parse_form(scope: HTTPScope, body: bytes) -> Upload:
    """The fields of an upload. Raises ApiError (415), InvalidInputError."""
    form = await _read_form(scope, body)
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InvalidInputError("`file` must be a file.", param="file", code="missing_required_parameter")
    if not isinstance(purpose, str):
        raise InvalidInputError("`purpose` is required.", param="purpose", code="missing_required_parameter")
    expires_after_s = parse_expiry(_text(form.get("expires_after[anchor]")), _text(form.get("expires_after[seconds]")))
    return Upload(file.filename, purpose, await file.read(), expires_after_s)


async def _read_form(scope: HTTPScope, body: bytes) -> Any:
    async def receive() -> HTTPReceiveMessage:
        return {"type": "http.request", "body": body, "more_body": False}

    request: Request[None, None, State] = Request(scope, receive=receive)
    if request.content_type[0] != "multipart/form-data":
        raise by_status(415, "Send a form: Content-Type: multipart/form-data.")
    try:
        return await request.form()
    except (HTTPException, ValueError, LookupError) as err:
        # A part may also name a charset it is not in, or that is none.
        raise InvalidInputError("The form is malformed.", param="file", code="invalid_form") from err


def _text(value: object) -> str | None:
    return None if value is None else str(value)
