"""Routes of small exchanges with a body: admitted, read under a limit, answered as JSON, errors as envelopes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import structlog
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from fleet_common.errors import FleetError
from fleet_ingress.context import TENANT_KEY, Ingress
from fleet_ingress.errors import ApiError, from_fleet_error
from fleet_ingress.routes.http import (
    ClientGoneError,
    announced_bytes,
    check_content_type,
    read_body,
    send_error,
    send_json,
)

log = structlog.get_logger(__name__)

#: From the tenant, the scope and the body to the answer. May raise ApiError and FleetError.
Handle = Callable[[str, HTTPScope, bytes], Awaitable[msgspec.Struct]]


def with_body(ingress: Ingress, handle: Handle, limit_bytes: int, *, is_json: bool = True) -> ASGIApp:
    """An ASGI application that reads the body and answers with what `handle` makes of it."""

    async def serve(any_scope: Scope, receive: Receive, send: Send) -> None:
        scope = cast("HTTPScope", any_scope)
        try:
            if is_json:
                check_content_type(scope)
            with ingress.gate.admit(announced_bytes(scope, limit_bytes)):
                body = await read_body(receive, limit_bytes, ingress.settings.body_timeout_s)
                answer = await handle(scope["state"][TENANT_KEY], scope, body)
            await send_json(send, msgspec.json.encode(answer), [])
        except ApiError as err:
            await send_error(scope, receive, send, err)
        except FleetError as err:
            await send_error(scope, receive, send, from_fleet_error(err))
        except ClientGoneError:
            log.info("client_left_early", path=scope["path"])

    return serve
