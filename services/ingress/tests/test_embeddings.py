"""`/v1/embeddings`: one vector per input, in order, as the client wants to read them (cases A20, A27)."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from fleet_contracts.base import Stage
from fleet_contracts.embed import EmbedParams
from fleet_ingress.testing import EMBEDDING_MODEL, TEXT_MODEL, Script, eventually, open_rig

EMBEDDINGS = "/v1/embeddings"


def script_of(body: Any) -> Script:
    given = body["input"]
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return Script(num_inputs=1 if is_one else len(given))


async def post(body: dict[str, Any]) -> httpx.Response:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        return await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, **body})


async def test_the_openai_client_gets_one_vector_per_input_in_order() -> None:
    async with open_rig(script_of) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none")
        answer = await client.embeddings.create(model=EMBEDDING_MODEL, input=["a", "b", "c"], user="u")

    assert (answer.object, answer.model) == ("list", EMBEDDING_MODEL)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert [item.embedding for item in answer.data] == [[row + column / 8 for column in range(8)] for row in range(3)]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)


async def test_base64_holds_the_same_numbers_as_float() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        body = {"model": EMBEDDING_MODEL, "input": ["a", "b"]}
        plain = (await http.post(EMBEDDINGS, json=body)).json()
        numbers = (await http.post(EMBEDDINGS, json={**body, "encoding_format": "float"})).json()
        packed = (await http.post(EMBEDDINGS, json={**body, "encoding_format": "base64"})).json()

    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in packed["data"]]
    assert plain == numbers
    assert decoded == [item["embedding"] for item in numbers["data"]]


@pytest.mark.parametrize("given", ["x", ["x"], [1, 2], [[1, 2]], " "])
async def test_every_form_of_input_becomes_a_prompt_and_a_pass_through_the_model(given: Any) -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, "input": given})

    assert (answer.status_code, len(answer.json()["data"])) == (200, 1)
    (task,) = rig.fleet.tasks
    assert [(step.stage, step.needs) for step in task.plan.steps] == [
        (Stage.PREPROCESS, ()),
        (Stage.DECODE, ("pre",)),
    ]
    assert task.step.params.route == "embedding"
    assert task.plan.later_tags == {"embed.v1"}


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": ["a", 1]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "dimensions": 3}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "truncate": True}, "truncate"),
)


async def test_refusals_name_the_field() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answers = [await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, **body}) for body, _ in REFUSED]

    named = [(answer.status_code, answer.json()["error"]["param"]) for answer in answers]
    assert named == [(400, param) for _, param in REFUSED]


async def test_vectors_are_cut_where_the_model_was_trained_for_it() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, "input": "a", "dimensions": 2})

    assert answer.json()["data"][0]["embedding"] == [0.0, 0.125]
    assert rig.fleet.tasks[0].plan.steps[-1].params == EmbedParams(dimensions=2)


async def test_as_many_inputs_as_are_allowed_come_back_in_order() -> None:
    answer = await post({"input": [[n + 1] for n in range(2048)], "encoding_format": "float"})

    assert [item["embedding"][0] for item in answer.json()["data"]] == list(range(2048))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": EMBEDDING_MODEL, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"model": EMBEDDING_MODEL, "prompt": "hi"}),
        ("/v1/tokenize", {"model": EMBEDDING_MODEL, "prompt": "hi"}),
        (EMBEDDINGS, {"model": TEXT_MODEL, "input": "hi"}),
    ],
)
async def test_a_model_of_the_wrong_kind_is_refused(path: str, body: dict[str, Any]) -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(path, json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_modality", "model")


async def test_the_model_is_listed_with_what_it_makes() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.get(f"/v1/models/{EMBEDDING_MODEL}")

    assert (answer.json()["input_modalities"], answer.json()["output_modalities"]) == (["text"], ["embedding"])


async def test_an_answer_lost_from_the_store_is_made_again() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        rig.fleet.lose_answers = 1
        answer = await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, "input": "a"})

        assert (answer.status_code, len(answer.json()["data"])) == (200, 1)
        assert [task.epoch > 0 for task in rig.fleet.tasks] == [False, True]
        await eventually(lambda: rig.fleet.statuses == ["accepted", "accepted"])


async def test_an_answer_that_is_always_lost_is_one_clear_error() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        rig.fleet.lose_answers = 100
        answer = await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, "input": "a"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "root_lost")


async def test_nothing_is_left_in_the_store() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, "input": ["a"] * 64})

        await eventually(lambda: sum(stats.num_tensors for stats in rig.store.stats().values()) == 0)


async def test_work_an_older_release_cannot_read_does_not_reach_its_pool() -> None:
    async with open_rig(script_of) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        await rig.fleet.register(Stage.DECODE, name="old", accepted_tags=("step_task.v1",))
        await eventually(lambda: any("old" in key for key in rig.ingress.view.catalog.workers))
        refused = await http.post(EMBEDDINGS, json={"model": EMBEDDING_MODEL, "input": "a"})
        rig.fleet.script = lambda _: Script()
        chat = {"model": TEXT_MODEL, "messages": [{"role": "user", "content": "hi"}]}
        served = await http.post("/v1/chat/completions", json=chat)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_unavailable")
    assert refused.headers["retry-after"]
    assert served.status_code == 200
    assert [task.plan.later_tags for task in rig.fleet.tasks] == [frozenset()]
