"""Rows of the failure cases that hold for every route (A15, A19, A20, A36)."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.routes.openapi import OPERATIONS
from fleet_ingress.testing import EMBEDDING_MODEL, IMAGE_MODEL, TEXT_MODEL, open_rig

POSTS = sorted(operation.path for operation in OPERATIONS if operation.method == "post")
BAD_BODIES = (b"{}", b"{", b"[]", b'{"model": 5}', b'{"model": "nope"}', b"")
CHAT = "/v1/chat/completions"


def envelope(answer: httpx.Response) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == set(ErrorBody.__struct_fields__)
    assert not any(word in answer.text for word in ("'loc'", "ctx", "msgspec", "Traceback", ".py", "Struct"))
    error: dict[str, object] = body["error"]
    return error


async def test_a15_a_bad_body_is_one_envelope_at_every_route() -> None:
    json_type = {"content-type": "application/json"}
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answers = [await http.post(path, content=body, headers=json_type) for path in POSTS for body in BAD_BODIES]

    assert [str(answer.url) for answer in answers if answer.status_code not in (400, 404, 415)] == []
    kinds = {envelope(answer)["type"] for answer in answers}
    assert kinds <= {"invalid_request_error", "not_found_error"}


async def test_a15_a_missing_key_and_a_wrong_method_are_envelopes_too() -> None:
    key = {"authorization": "Bearer secret"}
    async with open_rig(api_keys={"t": "secret"}) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        without_key = [await http.post(path, json={}) for path in POSTS]
        wrong_method = [await http.request("PATCH", path, headers=key) for path in POSTS]

    assert {(answer.status_code, envelope(answer)["type"]) for answer in without_key} == {(401, "authentication_error")}
    assert {(answer.status_code, envelope(answer)["code"]) for answer in wrong_method} == {(405, "method_not_allowed")}


@pytest.mark.parametrize(
    ("model", "kind"),
    [("nope", openai.NotFoundError), ("", openai.BadRequestError), (TEXT_MODEL, openai.BadRequestError)],
)
async def test_a20_the_official_client_raises_its_own_errors_for_embeddings(model: str, kind: type[Exception]) -> None:
    async with open_rig() as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(kind) as caught:
            await client.embeddings.create(model=model, input="a")

    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.body["param"] == "model"  # type: ignore[index]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a19_pictures_over_the_limit_are_refused_before_any_work(is_stream: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, *[part] * 20]}]
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(CHAT, json={"model": IMAGE_MODEL, "messages": messages, "stream": is_stream})

    error = envelope(answer)
    assert (answer.status_code, error["code"]) == (400, "too_many_images")
    assert "4" in str(error["message"]) and "20" in str(error["message"])
    assert rig.fleet.tasks == []


@pytest.mark.parametrize("num_mib", [1, 5, 20])
async def test_a36_bodies_of_ordinary_pictures_pass_by_default(num_mib: int) -> None:
    url = "data:image/png;base64," + "A" * (num_mib << 20)
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": IMAGE_MODEL, "messages": [{"role": "user", "content": content}]}).encode()
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=30) as http:
        answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 200
    assert len(body) > num_mib << 20


async def test_a36_embeddings_share_the_limit() -> None:
    async with open_rig(max_body_bytes=1 << 20) as rig, httpx.AsyncClient(base_url=rig.url, timeout=30) as http:
        answer = await http.post("/v1/embeddings", json={"model": EMBEDDING_MODEL, "input": "a" * (1 << 20)})

    assert (answer.status_code, envelope(answer)["code"]) == (413, "request_too_large")
