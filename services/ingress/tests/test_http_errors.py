"""Every error is OpenAI's envelope (cases A03, A15, A20, A22, A36, S12, S13, S17)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from fleet_contracts import codec, subjects
from fleet_contracts.base import Stage
from fleet_contracts.control import RoutingTable
from fleet_ingress.testing import IMAGE_MODEL, SPEECH_MODEL, TEXT_MODEL, IngressRig, eventually, open_rig
from fleet_ingress.testing.rig import served

CHAT = "/v1/chat/completions"
BODY = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def rig() -> AsyncIterator[IngressRig]:
    async with open_rig() as rig:
        yield rig


@pytest.fixture
async def http(rig: IngressRig) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=rig.url, timeout=20) as client:
        yield client


def envelope(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, its shape checked."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert {"message", "type", "param", "code"} == set(body["error"])
    for leak in ("Traceback", "fleet_", "Error(", ".py", "msgspec", "'loc'", "'ctx'"):
        assert leak not in body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/no/such.model", 404, "model_not_found"),
        ("GET", "/v1/requests/x", 404, "request_not_found"),
        ("GET", "/v1/requests/abc_" + "0" * 32, 404, "request_not_found"),
    ],
)
async def test_unknown_things_are_envelopes(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await http.request(method, path)

    assert (status, code) == (answer.status_code, envelope(answer)["code"])


@pytest.mark.parametrize(
    ("content", "content_type", "status", "param"),
    [
        (b'{"model":"llm","messages":[]}', "application/json", 400, "messages"),
        (b'{"model":"llm"}', "application/json", 400, "messages"),
        (b'{"messages":[{"role":"user","content":"x"}]}', "application/json", 400, "model"),
        (b"[]", "application/json", 400, None),
        (b"{", "application/json", 400, None),
        (b"", "application/json", 400, None),
        (b"hello", "text/plain", 415, None),
    ],
)
async def test_bad_bodies_are_refused(
    http: httpx.AsyncClient, content: bytes, content_type: str, status: int, param: str | None
) -> None:
    answer = await http.post(CHAT, content=content, headers={"content-type": content_type})

    assert (status, param) == (answer.status_code, envelope(answer)["param"])


@pytest.mark.parametrize(
    ("model", "status", "code"), [("nope", 404, "model_not_found"), (SPEECH_MODEL, 400, "unsupported_modality")]
)
async def test_model_that_cannot_answer_is_refused(http: httpx.AsyncClient, model: str, status: int, code: str) -> None:
    answer = await http.post(CHAT, json={**BODY, "model": model})

    error = envelope(answer)
    assert (status, code, "model") == (answer.status_code, error["code"], error["param"])


async def test_model_names_with_slash_and_dot_are_found(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    one = (await http.get(f"/v1/models/{IMAGE_MODEL}")).json()

    assert IMAGE_MODEL in [model["id"] for model in listed["data"]]
    assert one["input_modalities"] == ["text", "image"]
    assert one["output_modalities"] == ["text"]


async def test_chat_template_from_a_client_is_refused_without_running(rig: IngressRig, http: httpx.AsyncClient) -> None:
    template = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"

    answers = [
        await http.post(CHAT, json={**BODY, "chat_template": template}),
        await http.post(CHAT, json={**BODY, "chat_template_kwargs": {"chat_template": template}}),
    ]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert rig.fleet.bodies == []


async def test_openai_client_maps_errors_to_its_classes(rig: IngressRig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**{**BODY, "model": "nope"})
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**BODY, temperature=9)

    assert missing.value.code == "model_not_found"


async def test_unreachable_stage_is_503_with_retry_after_and_named_by_ready(
    rig: IngressRig, http: httpx.AsyncClient
) -> None:
    await rig.fleet.unregister(Stage.DECODE)
    await eventually(lambda: not rig.knows_fleet())

    answer = await http.post(CHAT, json=BODY)
    ready = await http.get("/health/ready")
    live = await http.get("/health/live")

    assert (answer.status_code, envelope(answer)["code"]) == (503, "stage_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert ready.status_code == 503
    assert "decode" in ready.json()["error"]["message"]
    assert live.status_code == 200


async def test_while_the_first_models_load_a_client_is_told_to_come_back(
    rig: IngressRig, http: httpx.AsyncClient
) -> None:
    nothing = RoutingTable(revision=99, made_unix_s=0.0, policy="static")
    await (await rig.broker.connect().kv(subjects.BUCKET_ROUTING)).put(subjects.ROUTING_KEY, codec.encode(nothing))
    await eventually(lambda: not rig.knows_fleet())

    answer = await http.post(CHAT, json=BODY)

    # Not 404: clients take that for final.
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_ready_when_every_stage_has_a_worker(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health/ready")).status_code == 200
    assert "fleet_ingress_inflight_requests" in (await http.get("/metrics")).text


async def test_keys_guard_everything_but_health_whatever_the_spelling() -> None:
    keys = {"acme": "sk-1", "other": "sk-2"}
    async with open_rig(api_keys=keys) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        paths = (CHAT, "//v1/chat/completions", "/v1/models/", "/V1/models", "/docs", "/metrics", "/nope")
        refused = [await http.get(path) for path in paths] + [await http.post(CHAT, json=BODY)]
        wrong = await http.get("/v1/models", headers={"authorization": "Bearer sk-3"})
        right = await http.post(CHAT, json=BODY, headers={"authorization": "Bearer sk-1"})
        health = [(await http.get(path)).status_code for path in ("/health/live", "/health/ready")]

    assert {401} == {answer.status_code for answer in [*refused, wrong]}
    assert {"authentication_error"} == {envelope(answer)["type"] for answer in [*refused, wrong]}
    assert right.status_code == 200
    assert health == [200, 200]


async def test_preflight_needs_no_key_but_a_configured_origin() -> None:
    headers = {
        "origin": "http://a.test",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    settings: dict[str, Any] = {"api_keys": {"acme": "sk-1"}, "cors_origins": ("http://a.test",)}
    async with open_rig(**settings) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        allowed = await http.options(CHAT, headers=headers)
        stranger = await http.options(CHAT, headers={**headers, "origin": "http://b.test"})
        keyless = await http.post(CHAT, json=BODY, headers={"origin": "http://a.test"})

    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == "http://a.test"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert stranger.status_code == 401
    assert (keyless.status_code, keyless.headers["access-control-allow-origin"]) == (401, "http://a.test")


async def test_bodies_up_to_the_limit_pass_and_one_byte_more_is_413() -> None:
    limit = 2 << 20
    async with open_rig(max_body_bytes=limit) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        full = _padded(limit)
        fits = await http.post(CHAT, content=full, headers={"content-type": "application/json"})
        over = await http.post(CHAT, content=full + b" ", headers={"content-type": "application/json"})
        chunked = await http.post(CHAT, content=_chunks(full + b" "), headers={"content-type": "application/json"})
        after = await http.get("/health/live")

    assert limit == len(full)
    assert fits.status_code == 200
    assert [over.status_code, chunked.status_code] == [413, 413]
    assert envelope(over)["code"] == "request_too_large"
    assert after.status_code == 200


async def test_too_many_requests_are_refused_before_any_work() -> None:
    async with open_rig(max_inflight_requests=1) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        with rig.ingress.gate.admit(1):
            answer = await http.post(CHAT, json=BODY)

    assert (answer.status_code, envelope(answer)["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"
    assert rig.fleet.bodies == []


@pytest.mark.parametrize("head", [b"X-Long: " + b"a" * 8_000_000, b"A: b\r\n" * 100_000], ids=["long", "many"])
async def test_oversized_headers_are_refused_and_the_connection_closed(rig: IngressRig, head: bytes) -> None:
    status = await _raw_status(rig, b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + head)

    assert status == b"431"


async def test_garbage_is_a_400_envelope(rig: IngressRig) -> None:
    assert await _raw_status(rig, b"\x16\x03\x01 no http at all\r\n\r\n") == b"400"


async def test_slow_headers_are_cut() -> None:
    async with open_rig(header_timeout_s=0.1) as rig:
        status = await _raw_status(rig, b"GET /health/live HTTP/1.1\r\nHo")

    assert status == b"408"


async def test_request_id_of_the_client_is_only_echoed(http: httpx.AsyncClient) -> None:
    answers = [await http.post(CHAT, json=BODY, headers={"x-request-id": "same"}) for _ in range(2)]

    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    ids = {answer.headers["x-fleet-request-id"] for answer in answers}
    assert len(ids) == 2
    assert {f"chatcmpl-{own}" for own in ids} == {answer.json()["id"] for answer in answers}


def _padded(num_bytes: int) -> bytes:
    head, tail = json.dumps({**BODY, "user": "@"}).encode().split(b"@")
    return head + b"a" * (num_bytes - len(head) - len(tail)) + tail


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100_000):
        yield body[start : start + 100_000]


async def _raw_status(rig: IngressRig, request: bytes) -> bytes:
    """Status of the answer to raw bytes; the answer must end with the connection."""
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(10):
            writer.write(request)
            await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    assert list(json.loads(body)) == ["error"]
    return head.split(b" ")[1]


class _BrokenDispatcher:
    """A bug, as the routes would meet it."""

    async def submit(self, *_: object) -> None:
        raise RuntimeError("a secret of the machine room")


async def test_bug_is_a_500_envelope_that_tells_nothing(rig: IngressRig) -> None:
    broken = dataclasses.replace(rig.ingress, dispatcher=_BrokenDispatcher())
    async with served(broken) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(CHAT, json=BODY)
        after = await http.get("/health/live")

    assert (answer.status_code, envelope(answer)["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert after.status_code == 200


async def test_wrong_method_is_told_the_right_one(http: httpx.AsyncClient) -> None:
    answer = await http.get(CHAT)

    assert "POST" in answer.headers["allow"]
