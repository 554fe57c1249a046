"""A route called in process: a line of a job gets what a client would, and never half of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from litestar import Litestar, Request, post
from litestar.datastructures import State
from litestar.types import ASGIApp, Receive, Scope, Send

from fleet_ingress.context import TENANT_KEY
from fleet_ingress.jobs.inprocess import InProcess
from fleet_ingress.jobs.origin import JobOrigin
from fleet_ingress.routes.http import CLOSE_KEY

SPEECH = "/v1/audio/speech"


def calling(pieces: Sequence[bytes], *, is_ended: bool, is_broken: bool = False) -> InProcess:
    """An application of one route that sends `pieces`."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["state"][TENANT_KEY] == "acme"
        headers = [(b"content-type", b"audio/wav"), (b"x-fleet-request-id", b"r1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if is_broken:
            scope["state"][CLOSE_KEY]()  # type: ignore[typeddict-item]
        if is_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @post(SPEECH, status_code=200)
    async def speak(request: Request[None, None, State]) -> ASGIApp:
        return serve

    return InProcess(Litestar(route_handlers=[speak], openapi_config=None), (SPEECH,), JobOrigin(60.0))


async def test_only_routes_the_application_has_can_be_endpoints() -> None:
    assert calling([], is_ended=True).endpoints == (SPEECH,)


async def test_a_streamed_answer_is_one_answer() -> None:
    answer = await calling([b"RI", b"FF"], is_ended=True).post(SPEECH, b"{}", "acme")

    assert (answer.status, answer.body, answer.content_type, answer.request_id) == (200, b"RIFF", "audio/wav", "r1")


@pytest.mark.parametrize(("is_ended", "is_broken"), [(False, False), (True, True), (False, True)])
async def test_an_answer_that_breaks_off_is_a_fault(is_ended: bool, is_broken: bool) -> None:
    answer = await calling([b"RI"], is_ended=is_ended, is_broken=is_broken).post(SPEECH, b"{}", "acme")

    assert answer.status == 500
    assert b'"stream_incomplete"' in answer.body
