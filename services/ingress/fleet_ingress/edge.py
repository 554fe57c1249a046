"""The outermost layer of HTTP: keys and tenants, browsers' CORS, the client's request id.

It stands before routing, so that no spelling of a path gets around the key.
"""

from __future__ import annotations

import hashlib
import re
from typing import cast

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from fleet_ingress.context import TENANT_KEY
from fleet_ingress.errors import ApiError, by_status
from fleet_ingress.picture_links import is_picture_path
from fleet_ingress.routes.health import LIVE_PATH, METRICS_PATH, READY_PATH
from fleet_ingress.routes.http import header, send_error
from fleet_ingress.settings import IngressSettings

#: Tenant of everybody where no keys are set.
DEFAULT_TENANT = "default"

_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,200}$")
_ALLOW_METHODS = b"GET, POST, DELETE, OPTIONS"
_ALLOW_HEADERS = b"authorization, content-type, x-request-id, x-fleet-timeout-s, idempotency-key"
_EXPOSE_HEADERS = b"x-request-id, x-fleet-request-id, x-fleet-step-request-ids, retry-after, idempotent-replayed"
_PREFLIGHT_AGE_S = b"600"


class Edge:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: IngressSettings) -> None:
        self._app = app
        # Digests, so that comparing takes the same time for every wrong key.
        self._tenants = {
            hashlib.sha256(key.get_secret_value().encode()).digest(): tenant
            for tenant, key in settings.api_keys.items()
        }
        self._origins = frozenset(settings.cors_origins)
        self._are_pictures_open = settings.is_image_url_public
        self._open_paths = {LIVE_PATH, READY_PATH} | ({METRICS_PATH} if settings.is_metrics_public else set())

    async def __call__(self, any_scope: Scope, receive: Receive, send: Send) -> None:
        # The server knows neither websockets nor lifespan events: every scope is an HTTP one.
        scope = cast("HTTPScope", any_scope)
        scope.setdefault("state", {})
        answer = _Answer(send, self._extra_headers(scope))
        try:
            if self._is_preflight(scope):
                await _preflight(answer.send)
                return
            scope["state"][TENANT_KEY] = self._tenant(scope)
            await self._app(scope, receive, answer.send)
        except ApiError as err:
            await send_error(scope, receive, answer.send, err)

    def _tenant(self, scope: HTTPScope) -> str:
        """Who asks. Raises ApiError (401)."""
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        tenant = self._tenants.get(hashlib.sha256(key.strip().encode("latin-1", "replace")).digest())
        if scheme.lower() == "bearer" and tenant is not None:
            return tenant
        is_open = scope["path"] in self._open_paths
        if is_open or (self._are_pictures_open and is_picture_path(scope["path"])):
            return DEFAULT_TENANT
        raise by_status(401)

    def _is_preflight(self, scope: HTTPScope) -> bool:
        return (
            scope["method"] == "OPTIONS"
            and self._is_allowed(header(scope, b"origin"))
            and header(scope, b"access-control-request-method") is not None
        )

    def _is_allowed(self, origin: str | None) -> bool:
        return origin is not None and ("*" in self._origins or origin in self._origins)

    def _extra_headers(self, scope: HTTPScope) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = []
        request_id = header(scope, b"x-request-id")
        if request_id is not None and _REQUEST_ID.match(request_id):
            headers.append((b"x-request-id", request_id.encode()))
        origin = header(scope, b"origin")
        if self._origins:
            headers.append((b"vary", b"origin"))
        if origin is not None and self._is_allowed(origin):
            headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
            headers.append((b"access-control-expose-headers", _EXPOSE_HEADERS))
        return headers


class _Answer:
    """A `send` that adds headers."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._headers]
        await self._send(message)


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", _ALLOW_METHODS),
        (b"access-control-allow-headers", _ALLOW_HEADERS),
        (b"access-control-max-age", _PREFLIGHT_AGE_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
