"""`GET /v1/requests/{id}`: what happened to a request, for the tenant that sent it."""

from __future__ import annotations

import re

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath

from fleet_common.errors import BusError
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.context import TENANT_KEY, ingress_of
from fleet_ingress.errors import NOT_FOUND, ApiError, from_fleet_error

_ID = re.compile(r"^(?:chatcmpl-|cmpl-)?([0-9a-zA-Z-]{1,40}_[0-9a-f]{32})$")


@get("/v1/requests/{request_id:str}")
async def get_request(request: Request[None, None, State], request_id: FromPath[str]) -> Response[bytes]:
    """The timeline; the id is the one of the answer, with or without `chatcmpl-`. Any ingress can be asked."""
    match = _ID.match(request_id)
    body = b""
    if match is not None:
        tenant = request.scope["state"][TENANT_KEY]
        try:
            body = await ingress_of(request.scope).dispatcher.report(match[1], tenant)
        except BusError as err:
            raise from_fleet_error(err) from err
    if not body:
        raise ApiError(404, ErrorBody(message="No such request.", type=NOT_FOUND, param="id", code="request_not_found"))
    return Response(body, media_type="application/json")
