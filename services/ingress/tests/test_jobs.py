"""Files, batches and jobs over HTTP: one ingress or two, scripted workers, everything in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest

from fleet_common.bus.memory import MemoryBroker
from fleet_common.clock import SystemClock
from fleet_contracts.base import PriorityClass, Stage
from fleet_contracts.events import Failure
from fleet_ingress.lifecycle import prepare_ingress
from fleet_ingress.settings import IngressSettings
from fleet_ingress.testing import TEXT_MODEL, Script, eventually, open_rig
from fleet_ingress.testing.rig import served

CHAT = "/v1/chat/completions"
OVERLOAD = Failure(error_type="server_error", code="engine_dead", message="x", status=500)
FINAL = ("completed", "failed", "expired", "cancelled")


def chat_body(text: str = "hi", **fields: object) -> dict[str, Any]:
    return {"model": TEXT_MODEL, "messages": [{"role": "user", "content": text}], **fields}


def line(custom_id: str, body: object = None, **fields: object) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body or chat_body(custom_id), **fields}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


async def upload(http: httpx.AsyncClient, content: bytes, purpose: str = "batch", **data: str) -> httpx.Response:
    files = {"file": ("in.jsonl", content)}
    return await http.post("/v1/files", files=files, data={"purpose": purpose, **data})


async def create(http: httpx.AsyncClient, lines: Sequence[object], **fields: object) -> httpx.Response:
    file_id = (await upload(http, jsonl(lines))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    return await http.post("/v1/batches", json=body)


async def ended(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    for _ in range(500):
        found: dict[str, Any] = (await http.get(path)).json()
        if found["status"] in FINAL:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def read_lines(http: httpx.AsyncClient, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = (await http.get(f"/v1/files/{file_id}/content")).content
    return [json.loads(text) for text in content.splitlines()]


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def waiting_for(gate: asyncio.Event) -> Script:
    """A worker that says nothing until the gate opens."""

    async def before_token(index: int) -> None:
        await gate.wait()

    return Script(before_token=before_token)


async def test_official_client_drives_a_batch_and_bad_lines_fail_as_online() -> None:
    bad = [chat_body(temperature=5), chat_body(modle=1), {**chat_body(), "model": "nope"}]
    lines = [line(f"ok-{number}") for number in range(9)]
    for number, body in enumerate(bad):
        lines.insert(number * 4, line(f"bad-{number}", body))
    async with open_rig() as rig, openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none") as client:
        file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"night": "1"}
        )
        async with httpx.AsyncClient(base_url=rig.url) as http:
            await ended(http, f"/v1/batches/{batch.id}")
            online = [(await http.post(CHAT, json=body)) for body in bad]
        done = await client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        assert done.error_file_id is not None
        output = (await client.files.content(done.output_file_id)).text
        errors = (await client.files.content(done.error_file_id)).text
        listed = [item.id async for item in client.batches.list(limit=1)]
        files = [item.purpose async for item in client.files.list()]
        await client.files.delete(file.id)

    answers, failures = [[json.loads(text) for text in part.splitlines()] for part in (output, errors)]
    assert (batch.status, done.status, done.metadata) == ("validating", "completed", {"night": "1"})
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (12, 9, 3)
    assert [item["custom_id"] for item in answers] == [f"ok-{number}" for number in range(9)]
    assert {item["response"]["body"]["choices"][0]["message"]["content"] for item in answers} == {"Hello world"}
    assert {item["response"]["status_code"] for item in answers} == {200}
    assert [item["custom_id"] for item in failures] == ["bad-0", "bad-1", "bad-2"]
    assert [(item["response"]["status_code"], item["response"]["body"]) for item in failures] == [
        (answer.status_code, answer.json()) for answer in online
    ]
    assert listed == [batch.id]
    assert files == ["batch_output", "batch_output", "batch"]


async def test_answers_too_large_for_a_message_and_lines_that_are_no_use_in_a_job() -> None:
    def script(body: Mapping[str, Any]) -> Script:
        return Script(pieces=[b"x" * 700_000, b"y"])

    lines = [line("large"), line("stream", chat_body(stream=True)), line("array", ["x"]), line("text", "x")]
    async with open_rig(script) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        batch = (await create(http, lines)).json()
        await http.delete(f"/v1/files/{batch['input_file_id']}")
        done = await ended(http, f"/v1/batches/{batch['id']}")
        answers = await read_lines(http, done["output_file_id"])
        errors = await read_lines(http, done["error_file_id"])
        online = await http.post(CHAT, json=["x"])
        await eventually(lambda: len(rig.broker.objects("fleet_files").names) == 2)

    (answer,) = answers
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "x" * 700_000 + "y"
    assert [item["response"]["body"]["error"]["code"] for item in errors] == ["unsupported_in_job"] + 2 * [
        "invalid_json"
    ]
    assert errors[1]["response"]["body"] == online.json()


async def test_lines_not_tried_in_time_get_an_error_each() -> None:
    gate = asyncio.Event()
    async with (
        open_rig(lambda _: waiting_for(gate), job_max_running_lines=1) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        batch = (await create(http, [line("a"), line("b")])).json()
        await eventually(lambda: rig.fleet.num_running == 1)
        await rig.ingress.jobs.store.change_job(
            "default", batch["id"], lambda record: msgspec.structs.replace(record, expires_unix_s=1.0)
        )
        done = await ended(http, f"/v1/batches/{batch['id']}")
        errors = await read_lines(http, done["error_file_id"])
        gate.set()

    assert (done["status"], done["output_file_id"]) == ("expired", None)
    assert [(item["custom_id"], item["response"], item["error"]["code"]) for item in errors] == [
        ("a", None, "batch_expired"),
        ("b", None, "batch_expired"),
    ]


async def test_an_ingress_that_drains_ends_its_lines_and_gives_the_job_away() -> None:
    gate = asyncio.Event()
    async with (
        open_rig(lambda _: waiting_for(gate), job_max_running_lines=1) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        batch = (await create(http, [line("a"), line("b")])).json()
        await eventually(lambda: rig.fleet.num_running == 1)
        rig.ingress.gate.is_stopping = True
        gate.set()
        bucket = rig.broker.bucket("fleet_jobs")
        await eventually(lambda: not any(key.startswith("lease.") for key in bucket.contents()))
        found = (await http.get(f"/v1/batches/{batch['id']}")).json()

    assert (found["status"], found["request_counts"]["completed"], len(rig.fleet.tasks)) == ("in_progress", 1, 1)


async def test_lines_run_in_the_batch_class_whatever_they_ask_for() -> None:
    lines = [line("a"), line("b", chat_body(priority="realtime")), line("c", chat_body(priority="background"))]
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        batch = await create(http, lines)
        await ended(http, f"/v1/batches/{batch.json()['id']}")
        await http.post(CHAT, json=chat_body())

    classes = [task.priority_class for task in rig.fleet.tasks]
    assert sorted(classes[:3]) == [PriorityClass.BACKGROUND, PriorityClass.BATCH, PriorityClass.BATCH]
    assert classes[3] is PriorityClass.REALTIME


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", "Line 3"),
        (jsonl([line("a")]) + b"{oops\n", "invalid_json_line", "Line 2"),
        (jsonl([line("a"), {"custom_id": "b", "method": "POST", "url": CHAT}]), "invalid_line", "Line 2"),
        (jsonl([line("a", url="/v1/embeddings")]), "invalid_url", "Line 1"),
        (jsonl([line("a", method="GET")]), "invalid_method", "Line 1"),
        (jsonl([{**line("a"), "custom_id": ""}]), "invalid_line", "Line 1"),
        (b"\n\n", "empty_file", "no lines"),
        (jsonl([line(str(number)) for number in range(6)]), "too_many_lines", "more than 5"),
    ],
)
async def test_a_file_that_is_no_batch_is_refused_at_creation(text: bytes, code: str, place: str) -> None:
    """Case A34 and what else can be wrong with a file."""
    async with open_rig(max_job_lines=5) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        file_id = (await upload(http, text)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        answer = await http.post("/v1/batches", json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert place in answer.json()["error"]["message"]


async def test_batches_are_checked_before_they_are_accepted() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        file_id = (await upload(http, jsonl([line("a")]))).json()["id"]
        other = (await upload(http, b"x", "user_data")).json()["id"]
        good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        refused = [
            error_of(await http.post("/v1/batches", json={**good, **change}))
            for change in (
                {"input_file_id": other},
                {"input_file_id": "file-nope"},
                {"input_file_id": "../x y"},
                {"endpoint": "/v1/models"},
                {"completion_window": "1h"},
                {"metadata": {str(number): "x" for number in range(17)}},
                {"what": 1},
            )
        ]

    assert refused == [
        (400, "invalid_purpose", "input_file_id"),
        (404, "file_not_found", "input_file_id"),
        (404, "file_not_found", "input_file_id"),
        (400, "invalid_endpoint", "endpoint"),
        (400, "invalid_value", "completion_window"),
        (400, "invalid_value", "metadata"),
        (400, "unknown_parameter", "what"),
    ]


async def test_what_is_anothers_looks_like_what_is_not_there() -> None:
    keys = {"acme": "key-a", "evil": "key-e"}
    async with open_rig(api_keys=keys) as rig:
        clients = [
            httpx.AsyncClient(base_url=rig.url, headers={"authorization": f"Bearer {key}"}) for key in keys.values()
        ]
        acme, evil = clients
        batch = (await create(acme, [line("a")])).json()
        job = (await acme.post("/v1/jobs", json={"endpoint": CHAT, "body": chat_body()})).json()
        file_id = batch["input_file_id"]
        asked = [
            ("GET", "/v1/files/", file_id, ""),
            ("GET", "/v1/files/", file_id, "/content"),
            ("DELETE", "/v1/files/", file_id, ""),
            ("GET", "/v1/batches/", batch["id"], ""),
            ("POST", "/v1/batches/", batch["id"], "/cancel"),
            ("GET", "/v1/jobs/", job["id"], ""),
            ("GET", "/v1/jobs/", job["id"], "/result"),
            ("POST", "/v1/jobs/", job["id"], "/cancel"),
        ]
        pairs = [
            (
                await evil.request(method, f"{start}{real}{end}"),
                await evil.request(method, f"{start}{real[:-2]}zz{end}"),
                real,
            )
            for method, start, real, end in asked
        ]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        stolen = await evil.post("/v1/batches", json=body)
        lists = [(await evil.get(path)).json()["data"] for path in ("/v1/files", "/v1/batches", "/v1/jobs")]
        mine = await ended(acme, f"/v1/batches/{batch['id']}")
        for client in clients:
            await client.aclose()

    for foreign, missing, real in pairs:
        assert foreign.status_code == 404
        assert foreign.text.replace(real, "?") == missing.text.replace(f"{real[:-2]}zz", "?")
    assert error_of(stolen) == (404, "file_not_found", "input_file_id")
    assert lists == [[], [], []]
    assert mine["request_counts"]["completed"] == 1


async def test_a_cancelled_batch_keeps_what_is_done_and_may_be_cancelled_twice() -> None:
    gate = asyncio.Event()

    def script(body: Mapping[str, Any]) -> Script:
        async def before_token(index: int) -> None:
            if index and body["messages"][0]["content"] != "quick":
                await gate.wait()

        return Script(before_token=before_token)

    lines = [line("quick"), *(line(f"slow-{number}") for number in range(6))]
    async with open_rig(script, job_max_running_lines=2) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        batch = (await create(http, lines)).json()
        await eventually(lambda: rig.fleet.num_running == 2 and len(rig.fleet.tasks) == 3)
        first = await http.post(f"/v1/batches/{batch['id']}/cancel")
        done = await ended(http, f"/v1/batches/{batch['id']}")
        again = await http.post(f"/v1/batches/{batch['id']}/cancel")
        answers = await read_lines(http, done["output_file_id"])
        await eventually(lambda: len(rig.fleet.cancelled) == 2)
        gate.set()

    assert (first.status_code, first.json()["status"]) == (200, "cancelling")
    assert (done["status"], done["error_file_id"]) == ("cancelled", None)
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    assert [item["custom_id"] for item in answers] == ["quick"]


async def test_what_is_over_cannot_be_cancelled() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        batch = (await create(http, [line("a")])).json()
        await ended(http, f"/v1/batches/{batch['id']}")
        answer = await http.post(f"/v1/batches/{batch['id']}/cancel")

    assert error_of(answer) == (409, "batch_not_cancellable", None)


async def test_a_fault_is_tried_again_and_becomes_the_outcome_in_the_end() -> None:
    seen: dict[str, int] = {}

    def script(body: Mapping[str, Any]) -> Script:
        text = body["messages"][0]["content"]
        seen[text] = seen.get(text, 0) + 1
        is_bad = text == "always" or (text == "once" and seen[text] == 1)
        return Script(fail=OVERLOAD if is_bad else None)

    async with open_rig(script, job_max_attempts=3) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        batch = (await create(http, [line("once"), line("always")])).json()
        done = await ended(http, f"/v1/batches/{batch['id']}")
        errors = await read_lines(http, done["error_file_id"])

    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert seen == {"once": 2, "always": 3}
    assert [item["response"]["body"]["error"]["code"] for item in errors] == ["engine_dead"]


async def test_a_refused_job_waits_until_the_fleet_is_back() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        await rig.fleet.unregister(Stage.DECODE)
        await eventually(lambda: bool(rig.ingress.view.catalog.missing()))
        batch = (await create(http, [line("a")])).json()
        await asyncio.sleep(0.3)
        waiting = (await http.get(f"/v1/batches/{batch['id']}")).json()
        await rig.fleet.register(Stage.DECODE)
        done = await ended(http, f"/v1/batches/{batch['id']}")

    assert waiting["request_counts"] == {"total": 1, "completed": 0, "failed": 0}
    assert done["request_counts"]["completed"] == 1


async def test_another_ingress_goes_on_where_one_died() -> None:
    """The first is killed between finishing lines and counting them: what is recorded is not done again."""
    gate = asyncio.Event()

    def script(body: Mapping[str, Any]) -> Script:
        async def before_token(index: int) -> None:
            if body["messages"][0]["content"] == "slow":
                await gate.wait()

        return Script(before_token=before_token)

    broker = MemoryBroker(registry_ttl_s=3600.0)
    names = [f"l{number}" for number in range(5)]
    lines = [*(line(name) for name in names), line("slow")]
    lines_bucket = broker.bucket("fleet_lines")
    async with open_rig(script, broker=broker, job_lease_s=1.0) as rig:
        settings = IngressSettings.model_validate({"http_port": 0, "job_lease_s": 1.0, "job_max_driven": 1})
        async with httpx.AsyncClient(base_url=rig.url) as http:
            batch = (await create(http, lines)).json()
            await eventually(lambda: len(lines_bucket.contents()) == 5)
            await forget_its_lease(broker, batch["id"])
            async with (
                prepare_ingress(settings, broker.connect(), rig.store, SystemClock()) as second,
                served(second) as url,
                httpx.AsyncClient(base_url=url) as other,
            ):
                await eventually(lambda: len(rig.fleet.tasks) == 7)
                gate.set()
                done = await ended(other, f"/v1/batches/{batch['id']}")
                answers = await read_lines(other, done["output_file_id"])

    assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    assert [item["custom_id"] for item in answers] == [*names, "slow"]
    texts = [body["messages"][0]["content"] for body in rig.fleet.bodies]  # type: ignore[index]
    assert sorted(texts) == sorted([*names, "slow", "slow"])
    assert lines_bucket.contents() == {}


async def forget_its_lease(broker: MemoryBroker, job_id: str) -> None:
    """The ingress is frozen from here on, as far as the bus is concerned: its lease runs out."""
    bus = broker.connect()
    jobs = await bus.kv("fleet_jobs")
    await jobs.put(f"lease.{job_id}", b"\x82\xa4type\xacjob_lease.v1\xaaingress_id\xa5other", ttl_s=1)
    await asyncio.sleep(0.6)


async def test_a_job_of_one_request_ends_with_the_answer_of_its_route() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        good = (
            await http.post("/v1/jobs", json={"endpoint": CHAT, "body": chat_body(), "metadata": {"a": "b"}})
        ).json()
        bad = (await http.post("/v1/jobs", json={"endpoint": CHAT, "body": chat_body(temperature=5)})).json()
        ends = [await ended(http, f"/v1/jobs/{job['id']}") for job in (good, bad)]
        results = [await http.get(f"/v1/jobs/{job['id']}/result") for job in (good, bad)]
        online = await http.post(CHAT, json=chat_body(temperature=5))
        listed = (await http.get("/v1/jobs")).json()["data"]
        batches = (await http.get("/v1/batches")).json()["data"]
        refused = [
            error_of(await http.post("/v1/jobs", json=body))
            for body in ({"endpoint": "/v1/files", "body": {}}, {"endpoint": CHAT}, {"endpoint": CHAT, "body": []})
        ]
        unknown = error_of(await http.get(f"/v1/batches/{good['id']}"))

    assert [end["status"] for end in ends] == ["completed", "failed"]
    assert ends[0]["metadata"] == {"a": "b"}
    assert results[0].json()["choices"][0]["message"]["content"] == "Hello world"
    assert (results[1].status_code, results[1].json()) == (400, online.json())
    assert [job["id"] for job in listed] == [bad["id"], good["id"]]
    assert ends[1]["error"] == online.json()["error"]
    assert (batches, unknown) == ([], (404, "batch_not_found", "id"))
    assert refused == [
        (400, "invalid_endpoint", "endpoint"),
        (400, "missing_required_parameter", "body"),
        (400, "invalid_value", "body"),
    ]


async def test_a_running_job_has_no_result_and_can_be_cancelled() -> None:
    gate = asyncio.Event()
    async with (
        open_rig(lambda _: waiting_for(gate)) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        job = (await http.post("/v1/jobs", json={"endpoint": CHAT, "body": chat_body()})).json()
        await eventually(lambda: rig.fleet.num_running == 1)
        early = error_of(await http.get(f"/v1/jobs/{job['id']}/result"))
        await http.post(f"/v1/jobs/{job['id']}/cancel")
        done = await ended(http, f"/v1/jobs/{job['id']}")
        late = error_of(await http.get(f"/v1/jobs/{job['id']}/result"))
        gate.set()

    assert (early, late) == ((409, "job_has_no_result", None), (409, "job_has_no_result", None))
    assert (done["status"], done["has_result"]) == ("cancelled", False)


async def test_open_jobs_are_bounded() -> None:
    gate = asyncio.Event()
    async with (
        open_rig(lambda _: waiting_for(gate), max_open_jobs_per_tenant=1) as rig,
        httpx.AsyncClient(base_url=rig.url) as http,
    ):
        body = {"endpoint": CHAT, "body": chat_body()}
        answers = [await http.post("/v1/jobs", json=body) for _ in range(2)]
        gate.set()

    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].headers["retry-after"] == "10"
