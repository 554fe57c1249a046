"""`/v1/tokenize` counts what the generating routes would read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fleet_contracts.events import Failure
from fleet_ingress.testing import TEXT_MODEL, Script, open_rig

TOKENIZE = "/v1/tokenize"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "route"),
    [
        ({"messages": [USER]}, "chat"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}, "chat"),
        ({"prompt": "hi"}, "completion"),
        ({"prompt": [1, 2]}, "completion"),
    ],
)
async def test_the_count_comes_from_preprocess_alone(fields: dict[str, Any], route: str) -> None:
    script = Script(num_prompt_tokens=42)
    async with open_rig(lambda _: script) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(TOKENIZE, json={"model": TEXT_MODEL, **fields})

    assert answer.json() == {"object": "token_count", "model": TEXT_MODEL, "count": 42}
    (task,) = rig.fleet.tasks
    assert [step.step_id for step in task.plan.steps] == ["pre"]
    assert (task.step.params.route, task.step.params.max_new_tokens) == (route, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": [USER], "prompt": "hi"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "hi", "max_tokens": 5}, "max_tokens"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
async def test_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answer = await http.post(TOKENIZE, json={"model": TEXT_MODEL, **fields})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_prompt_over_the_context_is_refused_with_its_counts() -> None:
    refuse = Failure(
        error_type="invalid_request_error",
        code="context_length_exceeded",
        message="this model's context is 4096 tokens, but the request has a prompt of 5000 tokens",
        status=400,
        param="messages",
    )
    async with open_rig(lambda _: Script(refuse=refuse)) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answer = await http.post(TOKENIZE, json={"model": TEXT_MODEL, "messages": [USER]})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
