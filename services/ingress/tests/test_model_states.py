"""Models that load, failed, or are taken off, and adapters of models (cases A15, A20)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from fleet_contracts import codec, subjects
from fleet_contracts.decode import DecodeParams
from fleet_contracts.models import AdapterSpec, ModelSpec, ModelState, ModelStatus
from fleet_ingress.core.reason import public_reason
from fleet_ingress.testing import TEXT_MODEL, IngressRig, eventually, open_rig

NEW = "org/new-1.5"
QUESTION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
async def rig() -> AsyncIterator[IngressRig]:
    async with open_rig() as rig:
        yield rig


@pytest.fixture
async def http(rig: IngressRig) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=rig.url, timeout=20) as client:
        yield client


async def record(rig: IngressRig, model: str, state: ModelState | None, generation: int = 1, **facts: Any) -> None:
    """Put what is wanted and, unless None, what became of it into the bucket."""
    bucket = await rig.broker.connect().kv(subjects.BUCKET_MODELS)
    is_wanted = state not in (ModelState.DRAINING, ModelState.GONE)
    spec = ModelSpec(model=model, source="s", generation=generation, is_wanted=is_wanted)
    await bucket.put(subjects.model_spec_key(model), codec.encode(spec))
    if state is not None:
        status = ModelStatus(model=model, generation=generation, state=state, since_unix_s=0.0, **facts)
        await bucket.put(subjects.model_status_key(model), codec.encode(status))
    await eventually(lambda: rig.ingress.view.catalog.wanted.get(model) == spec)


async def ask(http: httpx.AsyncClient, model: str) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": model, **QUESTION})


async def listed(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in (await http.get("/v1/models")).json()["data"]}


@pytest.mark.parametrize("state", [None, ModelState.LOADING], ids=["not-taken-up", "loading"])
async def test_a_model_that_loads_is_listed_and_asks_for_patience(
    rig: IngressRig, http: httpx.AsyncClient, state: ModelState | None
) -> None:
    await record(rig, NEW, state)

    answer = await ask(http, NEW)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await listed(http))[NEW]["state"] == "loading"
    assert (await http.get(f"/v1/models/{NEW}")).json()["state"] == "loading"


async def test_a_model_that_failed_says_why_without_our_insides(rig: IngressRig, http: httpx.AsyncClient) -> None:
    error = (
        "decode-new-0 does not start: EngineDeadError: vLLM could not load '/srv/models/new': no config.json"
        " (see /srv/run/logs/decode.log)"
    )
    await record(rig, NEW, ModelState.FAILED, error=error)

    answer = await ask(http, NEW)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
    message = answer.json()["error"]["message"]
    assert "no config.json" in message
    assert [inside for inside in ("/srv", "Error", "logs") if inside in message] == []
    entry = (await listed(http))[NEW]
    assert (entry["state"], entry["error"]) == ("failed", message.partition("failed to load: ")[2])


@pytest.mark.parametrize("state", [ModelState.LOADING, ModelState.FAILED, ModelState.DRAINING])
async def test_other_models_do_not_notice(rig: IngressRig, http: httpx.AsyncClient, state: ModelState) -> None:
    await record(rig, NEW, state, error="why" if state is ModelState.FAILED else "")

    assert (await ask(http, TEXT_MODEL)).status_code == 200
    assert (await http.get("/health/ready")).status_code == 200


async def test_a_model_that_is_taken_off_takes_nothing_new_and_is_listed_no_longer(
    rig: IngressRig, http: httpx.AsyncClient
) -> None:
    await record(rig, TEXT_MODEL, ModelState.DRAINING, generation=2)

    answer = await ask(http, TEXT_MODEL)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "taken off" in answer.json()["error"]["message"]
    assert TEXT_MODEL not in await listed(http)


async def test_a_model_that_is_gone_is_unknown_whatever_the_table_says(
    rig: IngressRig, http: httpx.AsyncClient
) -> None:
    await record(rig, TEXT_MODEL, ModelState.GONE, generation=2)
    await eventually(lambda: TEXT_MODEL in rig.ingress.view.catalog.statuses)

    answer = await ask(http, TEXT_MODEL)

    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert "does not exist" in answer.json()["error"]["message"]


async def test_a_record_that_expired_is_forgotten(rig: IngressRig, http: httpx.AsyncClient) -> None:
    await record(rig, NEW, ModelState.FAILED, error="why")
    bucket = await rig.broker.connect().kv(subjects.BUCKET_MODELS)
    for key in (subjects.model_spec_key(NEW), subjects.model_status_key(NEW)):
        await bucket.delete(key)
    await eventually(lambda: NEW not in rig.ingress.view.catalog.wanted)

    assert (await ask(http, NEW)).status_code == 404


async def test_an_adapter_is_asked_for_by_its_name_and_runs_on_its_model(
    rig: IngressRig, http: httpx.AsyncClient
) -> None:
    await record(rig, TEXT_MODEL, ModelState.READY, adapters=("pirate",))
    await eventually(lambda: rig.ingress.view.catalog.standing("pirate") is not None)

    answer = await ask(http, "pirate")

    assert (answer.status_code, answer.json()["model"]) == (200, "pirate")
    entry = (await listed(http))["pirate"]
    assert (entry["parent"], entry["state"]) == (TEXT_MODEL, "ready")
    steps = rig.fleet.tasks[-1].plan.steps
    decode = next(step for step in steps if isinstance(step.params, DecodeParams))
    assert {step.model for step in steps} == {TEXT_MODEL}
    assert isinstance(decode.params, DecodeParams)
    assert decode.params.adapter == "pirate"


async def test_a_model_that_gets_another_adapter_serves_all_the_while(rig: IngressRig, http: httpx.AsyncClient) -> None:
    await record(rig, TEXT_MODEL, ModelState.READY)
    adapters = (AdapterSpec(name="pirate", path="/p"),)
    newer = ModelSpec(model=TEXT_MODEL, source="s", generation=2, adapters=adapters)
    bucket = await rig.broker.connect().kv(subjects.BUCKET_MODELS)
    await bucket.put(subjects.model_spec_key(TEXT_MODEL), codec.encode(newer))
    await eventually(lambda: rig.ingress.view.catalog.wanted[TEXT_MODEL] == newer)

    assert (await ask(http, TEXT_MODEL)).status_code == 200
    assert (await ask(http, "pirate")).status_code == 404


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("OSError: no /a/b/model-1.5/config.json", "no config.json"),
        ("vllm.exceptions.SomeError: bad\n value", "bad value"),
        ("decode-0 was killed by signal 9", "decode-0 was killed by signal 9"),
        ("org/name is no model", "org/name is no model"),
        ("see https://example.org/page", "see https://example.org/page"),
    ],
)
def test_reasons_lose_places_and_class_names(error: str, shown: str) -> None:
    assert public_reason(error) == shown
