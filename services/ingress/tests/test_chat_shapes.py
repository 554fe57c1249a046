"""Chat and completions through the official client, unmodified (and case C30)."""

from __future__ import annotations

from asyncio import TaskGroup
from collections.abc import Mapping
from typing import Any

import httpx
import openai

from fleet_ingress.testing import TEXT_MODEL, Script, open_rig

_HELLO = [{"role": "user", "content": "hi"}]


async def test_whole_chat_completion_has_text_usage_and_finish_reason() -> None:
    async with open_rig() as rig, openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x") as client:
        answer = await client.chat.completions.create(model=TEXT_MODEL, messages=_HELLO)

    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 2, 9)
    assert answer.id.startswith("chatcmpl-")


async def test_stream_has_role_first_and_finish_reason_last() -> None:
    async with open_rig() as rig, openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x") as client:
        stream = await client.chat.completions.create(model=TEXT_MODEL, messages=_HELLO, stream=True)
        chunks = [chunk async for chunk in stream]

    deltas = [chunk.choices[0] for chunk in chunks]
    assert deltas[0].delta.role == "assistant"
    assert "".join(delta.delta.content or "" for delta in deltas) == "Hello world"
    assert [None] * (len(deltas) - 1) + ["stop"] == [delta.finish_reason for delta in deltas]
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


async def test_a_request_id_of_the_clients_choice_is_only_echoed() -> None:
    def echo(body: Mapping[str, Any]) -> Script:
        return Script(pieces=[body["messages"][0]["content"].encode()])

    async with open_rig(echo) as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http, TaskGroup() as group:
        tasks = [
            group.create_task(
                http.post(
                    "/v1/chat/completions",
                    json={
                        "model": TEXT_MODEL,
                        "messages": [{"role": "user", "content": f"hi {number}"}],
                        "request_id": "r",
                    },
                    headers={"x-request-id": "same"},
                )
            )
            for number in range(50)
        ]
        answers = [await task for task in tasks]

    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [f"hi {number}" for number in range(50)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 50
