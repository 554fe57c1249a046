"""Pictures from prompts, whole or as server-sent events with progress and partial pictures.

As with text, no response header leaves before there is something to show: bad input is a 4xx.
"""

from __future__ import annotations

import asyncio
import secrets

from litestar import Request, Response, get, post
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.types import ASGIApp, HTTPScope, Send

from fleet_common.errors import EngineError, FleetError
from fleet_contracts import codec
from fleet_contracts.preprocess import EditFiles
from fleet_ingress.api.decode import decode_request
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.api.form import is_form, read_form
from fleet_ingress.api.images import EditRequest, ImageRequest
from fleet_ingress.context import TENANT_KEY, ingress_of
from fleet_ingress.core.image_answers import ImageRenderer, KeptPicture, ShownPicture
from fleet_ingress.core.image_requests import parse_edit, parse_images, read_edit
from fleet_ingress.core.parsed import ParsedRequest
from fleet_ingress.core.picture_stream import ProgressMade
from fleet_ingress.errors import NOT_FOUND, ApiError, by_status, from_failure, from_fleet_error
from fleet_ingress.idempotency import fingerprint
from fleet_ingress.live import LiveRequest
from fleet_ingress.picture_links import FILES_PATH, base_url
from fleet_ingress.routes.generation import THREAD_BYTES, Exchange, Route
from fleet_ingress.routes.http import close_after_answer, header, send_json
from fleet_ingress.served import served

GENERATION = Route("image_generation", "")
EDIT = Route("image_edit", "")

_NO_PICTURE = ErrorBody(
    message="There is no such picture, or no longer.", type=NOT_FOUND, param="name", code="picture_not_found"
)

_MAX_SEED = 2**31


@post("/v1/images/generations", status_code=200)
async def create_images(request: Request[None, None, State]) -> ASGIApp:
    """Make pictures of a prompt."""
    return ImageExchange(ingress_of(request.scope), GENERATION).serve


@post("/v1/images/edits", status_code=200)
async def create_edits(request: Request[None, None, State]) -> ASGIApp:
    """Change pictures as a prompt says."""
    return EditExchange(ingress_of(request.scope), EDIT).serve


@get(FILES_PATH + "{name:str}")
async def get_picture(request: Request[None, None, State], name: FromPath[str]) -> Response[bytes]:
    """The file of a picture that was answered as a URL."""
    try:
        found = await ingress_of(request.scope).links.find(request.scope["state"][TENANT_KEY], name)
    except FleetError as err:
        raise from_fleet_error(err) from err
    if found is None:
        raise ApiError(404, _NO_PICTURE)
    file, media_type = found
    # Kept nowhere on the way, and never taken for anything but a picture.
    headers = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}
    return Response(file, media_type=media_type, headers=headers)


class ImageExchange(Exchange):
    """One request for pictures."""

    async def _read(self, scope: HTTPScope, body: bytes) -> tuple[ParsedRequest, bytes]:
        asked = decode_request(body, ImageRequest)
        # What a request does not name is the model's own.
        card, _ = served(self._ingress.view.catalog, asked.model)
        # Named once, here: whichever worker makes the pictures, and however often, they are the same.
        return parse_images(asked, card, secrets.randbelow(_MAX_SEED)), body

    def _on_served_model(self, parsed: ParsedRequest) -> ParsedRequest:
        return parsed

    async def _answer(self, scope: HTTPScope, live: LiveRequest, send: Send) -> None:
        params = live.parsed.pictures
        assert params is not None
        renderer = ImageRenderer(params, int(live.created_unix_s), self._route.operation)
        if live.parsed.is_stream:
            await self._stream_pictures(scope, live, renderer, send)
        else:
            await self._all_pictures(scope, live, renderer, send)

    async def _all_pictures(self, scope: HTTPScope, live: LiveRequest, renderer: ImageRenderer, send: Send) -> None:
        news, end = await live.pictures_outcome()
        if end.failure is not None:
            raise from_failure(end.failure, live.request_id)
        if end.usage is None:
            return
        usage, pictures = end.usage, [one for one in news if isinstance(one, ShownPicture)]
        if not any(one.is_final for one in pictures):
            raise EngineError("no picture was made")
        if live.parsed.response_format == "url":
            kept = await self._kept(scope, live, [one for one in pictures if one.is_final])
            await send_json(send, renderer.body(pictures, usage, kept), self._id_headers())
            return
        is_large = sum(len(one.file) for one in pictures) >= THREAD_BYTES
        body = await asyncio.to_thread(renderer.body, pictures, usage) if is_large else renderer.body(pictures, usage)
        await send_json(send, body, self._id_headers())

    async def _kept(self, scope: HTTPScope, live: LiveRequest, pictures: list[ShownPicture]) -> dict[int, KeptPicture]:
        """Where the files lie, by choice. Raises FleetError."""
        params = live.parsed.pictures
        assert params is not None
        links, url = self._ingress.links, base_url(scope, self._ingress.settings)
        return {one.choice: await links.keep(live.tenant, one.file, params.format, url) for one in pictures}

    async def _stream_pictures(self, scope: HTTPScope, live: LiveRequest, renderer: ImageRenderer, send: Send) -> None:
        while True:
            news, end = await live.take_pictures()
            if events := await _rendered(renderer, news):
                await self._send_events(send, events)
            if end is None:
                continue
            if end.usage is not None:
                await self._send_events(send, renderer.end(end.usage))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif end.failure is not None:
                error = from_failure(end.failure, live.request_id)
                if not self._has_begun:
                    raise error
                close_after_answer(scope)
                last = b"event: error\ndata: " + error.envelope + b"\n\n"
                await send({"type": "http.response.body", "body": last, "more_body": False})
            return


class EditExchange(ImageExchange):
    """One edit. The fleet gets the files; the other fields travel as parameters."""

    _asked = b""

    def _check_content_type(self, scope: HTTPScope) -> None:
        if not is_form(header(scope, b"content-type") or "") or header(scope, b"content-encoding") is not None:
            raise by_status(415, "Send a form: Content-Type: multipart/form-data.")

    async def _read(self, scope: HTTPScope, body: bytes) -> tuple[ParsedRequest, bytes]:
        content_type = header(scope, b"content-type") or ""

        def read() -> tuple[EditRequest, EditFiles, bytes]:
            asked, files = read_edit(read_form(body, content_type))
            return asked, files, codec.encode(files)

        asked, files, root = read() if len(body) < THREAD_BYTES else await asyncio.to_thread(read)
        self._asked = repr(asked).encode()
        card, _ = served(self._ingress.view.catalog, asked.model)
        return parse_edit(asked, files, card, secrets.randbelow(_MAX_SEED)), root

    def _fingerprint(self, parsed: ParsedRequest, body: bytes) -> bytes:
        # Not the body itself: every form has another boundary. Not `parsed`: it may hold a seed of our own.
        return fingerprint(self._route.operation, self._asked + b"\0" + body)


async def _rendered(renderer: ImageRenderer, news: list[ShownPicture | ProgressMade]) -> bytes:
    is_large = sum(len(one.file) for one in news if isinstance(one, ShownPicture)) >= THREAD_BYTES
    return await asyncio.to_thread(renderer.events, news) if is_large else renderer.events(news)
