"""Recordings in a chat, at the edge: sent on, reported, and refused where a model does not hear."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fleet_contracts.base import Stage
from fleet_ingress.testing import IMAGE_MODEL, LISTENING_MODEL, SPEECH_MODEL, TEXT_MODEL, eventually, open_rig

CHAT = "/v1/chat/completions"
PARAM = "messages[0].content[1].input_audio"
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}
TEXT = {"type": "text", "text": "Who is it?"}


def body(model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": list(parts)}]}


async def test_a_recording_is_sent_on_and_reported() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(CHAT, json=body(LISTENING_MODEL, TEXT, AUDIO))
        report = (await http.get(f"/v1/requests/{answer.headers['x-fleet-request-id']}")).json()
        listed = (await http.get(f"/v1/models/{LISTENING_MODEL}")).json()

    assert answer.status_code == 200
    (task,) = rig.fleet.tasks
    assert [step.step_id for step in task.plan.steps] == ["pre", "enc0", "dec"]
    (medium,) = report["media"]
    assert (medium["kind"], medium["duration_s"], medium["sample_rate_hz"]) == ("audio", 1.0, 48_000)
    assert (listed["input_modalities"], listed["max_audios"]) == (["text", "audio"], 2)


@pytest.mark.parametrize("model", [TEXT_MODEL, IMAGE_MODEL])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_model_that_does_not_hear_is_a_400(model: str, is_stream: bool) -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(CHAT, json={**body(model, TEXT, AUDIO), "stream": is_stream})
        counted = await http.post("/v1/tokenize", json=body(model, TEXT, AUDIO))

    assert (answer.status_code, counted.status_code) == (400, 400)
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["message"]) == (
        "unsupported_modality",
        PARAM,
        "This model takes no audio.",
    )
    assert rig.fleet.tasks == []


async def test_a_model_that_only_transcribes_does_not_chat() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        answer = await http.post(CHAT, json=body(SPEECH_MODEL, TEXT, AUDIO))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


async def test_a_former_release_never_gets_a_plan_with_recordings() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url, timeout=20) as http:
        await rig.fleet.register(Stage.PREPROCESS, name="old", accepted_tags=("step_task.v1",))
        await eventually(lambda: any("old" in key for key in rig.ingress.view.catalog.workers))
        refused = await http.post(CHAT, json=body(LISTENING_MODEL, TEXT, AUDIO))
        taken = await http.post(CHAT, json=body(LISTENING_MODEL, TEXT))

    assert (refused.status_code, taken.status_code) == (503, 200)
