"""From an HTTP request for pictures to its answer: ingress, stage runner and step scheduler together."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from PIL import Image

from fleet_common.errors import TensorNotFoundError
from fleet_contracts import subjects
from fleet_contracts.base import Stage
from fleet_contracts.tensors import TensorRef
from fleet_diffusion import worker
from fleet_diffusion.engine.port import PictureInWork
from fleet_diffusion.engine.scripted import ScriptedModel
from fleet_ingress.testing.rig import eventually
from tests.support.painters import PAINTER, TEXT_MODEL, PictureFleet, picture_fleet

ASK = {"model": PAINTER, "prompt": "a red star", "seed": 5, "steps": 6}


class WatchedModel(ScriptedModel):
    """Counts passes; `between` is called after each, in the model's thread."""

    def __init__(self, **engine_args: object) -> None:
        super().__init__(engine_args)
        self.passes: list[list[str]] = []
        self.between: Callable[[], None] = lambda: None

    def step(self, pictures: Sequence[PictureInWork]) -> None:
        super().step(pictures)
        self.passes.append([picture.request.prompt for picture in pictures])  # type: ignore[attr-defined]
        self.between()


async def post(fleet: PictureFleet, **more: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        return await client.post(f"{fleet.url}/v1/images/generations", json={**ASK, **more})


def pixels(b64: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(b64))).convert("RGB"))


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def test_the_answer_is_in_openais_shape_and_seeds_make_it_again() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        answer = (await post(fleet, n=2, size="64x96", output_format="webp")).json()
        again = (await post(fleet, seed=answer["data"][1]["seed"], size="64x96", output_format="webp")).json()

    assert (answer["size"], answer["output_format"]) == ("64x96", "webp")
    assert answer["usage"] == {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3}
    assert [datum["seed"] for datum in answer["data"]] == [5, 6]
    assert pixels(answer["data"][0]["b64_json"]).shape == (96, 64, 3)
    assert answer["data"][1] == again["data"][0]
    assert answer["data"][0]["b64_json"] != answer["data"][1]["b64_json"]


async def test_without_a_seed_every_request_is_another_picture() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        first, second = [(await post(fleet, seed=None)).json() for _ in range(2)]

    assert first["data"][0]["seed"] != second["data"][0]["seed"]
    assert first["data"][0]["b64_json"] != second["data"][0]["b64_json"]


async def test_the_openai_client_draws_and_streams() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        client = AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none")
        whole = await client.images.generate(
            model=PAINTER, prompt="a red star", size="auto", extra_body={"seed": 5, "steps": 6}
        )
        stream = await client.images.generate(
            model=PAINTER, prompt="a red star", stream=True, partial_images=2, extra_body={"seed": 5, "steps": 6}
        )
        events = [event async for event in stream]
        models = {model.id: model for model in (await client.models.list()).data}

    assert whole.data is not None
    kinds = [event.type for event in events if event.type != "image_generation.progress"]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert events[-1].b64_json == whole.data[0].b64_json
    assert events[-1].usage.input_tokens == 3
    shown = models[PAINTER].model_dump()
    assert (shown["input_modalities"], shown["output_modalities"]) == (["text", "image"], ["image"])


async def test_a_stream_tells_progress_that_only_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PROGRESS_S", 0.05)
    async with picture_fleet(ScriptedModel({"cost_s": 0.006})) as fleet:
        answer = await post(fleet, stream=True, partial_images=1, n=2, steps=24)

    events = events_of(answer.text)
    assert all(name == event["type"] for name, event in events)
    ratios = [event["done_ratio"] for _, event in events if "done_ratio" in event]
    assert ratios
    assert ratios == sorted(ratios)
    shown = [(name.rpartition(".")[2], event["index"]) for name, event in events if "b64_json" in event]
    assert sorted(shown[:2]) == [("partial_image", 0), ("partial_image", 1)]
    assert sorted(shown[2:]) == [("completed", 0), ("completed", 1)]
    assert ["usage" in event for name, event in events if name.endswith("completed")] == [False, True]


BAD_SIZES = (
    *("90000x9000", "0x0", "7x7", "1000x1001", "-1x5", "1024", 1024, "1024X1024", "1e9x1"),
    *("64x60", "128x128", "064x64", "64x64 ", "", " auto"),
)


async def test_a_bad_size_is_refused_before_any_worker_sees_it() -> None:
    """Case A31."""
    model = WatchedModel()
    async with picture_fleet(model) as fleet:
        answers = [(await post(fleet, size=size)) for size in BAD_SIZES]
        queued = fleet.broker.work.payloads([Stage.DIFFUSION_GENERATE])

    told = [(answer.status_code, answer.json()["error"]["param"]) for answer in answers]
    assert told == [(400, "size")] * len(BAD_SIZES)
    assert model.passes == []
    assert queued == []


async def test_a_good_size_is_the_size_of_the_picture() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        for size, wanted in (("auto", (64, 64)), (None, (64, 64)), ("64x64", (64, 64)), ("128x96", (128, 96))):
            answer = (await post(fleet, size=size)).json()
            assert pixels(answer["data"][0]["b64_json"]).shape[1::-1] == wanted


BAD_FIELDS: tuple[tuple[dict[str, object], str], ...] = (
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"steps": 1001}, "steps"),
    ({"steps": None, "num_inference_steps": 1001}, "num_inference_steps"),
    ({"num_inference_steps": 7}, "num_inference_steps"),
    ({"guidance": 3.0, "guidance_scale": 4.0}, "guidance_scale"),
    ({"guidance": -1}, "guidance"),
    ({"guidance": 1.0, "negative_prompt": "red"}, "negative_prompt"),
    ({"seed": -1}, "seed"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * 501}, "prompt"),
    ({"negative_prompt": "x" * 501}, "negative_prompt"),
    ({"response_format": "url", "stream": True}, "response_format"),
    ({"output_format": "gif"}, "output_format"),
    ({"output_compression": 50}, "output_compression"),
    ({"partial_images": 1}, "partial_images"),
    ({"partial_images": 4, "stream": True}, "partial_images"),
    ({"quality": "hd"}, "quality"),
    ({"background": "transparent"}, "background"),
    ({"style": "vivid"}, "style"),
    ({"colour": "red"}, "colour"),
    ({"model": TEXT_MODEL}, "model"),
)


async def test_a_bad_field_is_named() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        answers = [await post(fleet, **change) for change, _ in BAD_FIELDS]

    assert [answer.status_code for answer in answers] == [400] * len(BAD_FIELDS)
    assert [answer.json()["error"]["param"] for answer in answers] == [param for _, param in BAD_FIELDS]


async def test_a_lone_surrogate_in_the_prompt_is_refused() -> None:
    """Case A29, for prompts of pictures."""
    async with picture_fleet(ScriptedModel({})) as fleet, httpx.AsyncClient(verify=False) as client:
        body = '{"model": "painter", "prompt": "a \\ud83d star"}'
        headers = {"content-type": "application/json"}
        answer = await client.post(f"{fleet.url}/v1/images/generations", content=body, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_unicode"


async def test_a_model_that_draws_is_no_model_to_chat_with() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet, httpx.AsyncClient(verify=False) as client:
        body = {"model": PAINTER, "messages": [{"role": "user", "content": "hi"}]}
        chat = await client.post(f"{fleet.url}/v1/chat/completions", json=body)
        unknown = await client.post(f"{fleet.url}/v1/images/generations", json={**ASK, "model": "nobody"})
        missing = {one.model for one in fleet.ingress.view.catalog.missing()}
        await (await fleet.broker.connect().kv(subjects.BUCKET_REGISTRY)).delete(
            "worker.diffusion_generate.diffusion-0"
        )
        await eventually(lambda: PAINTER in {one.model for one in fleet.ingress.view.catalog.missing()})
        nobody = await client.post(f"{fleet.url}/v1/images/generations", json=ASK)

    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "model")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert missing == {TEXT_MODEL}
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "stage_unavailable")


async def test_many_requests_at_once_each_get_their_own_pictures() -> None:
    """Cases C28 and C30: seeds 1..8, steps 10 and 20 mixed, one X-Request-Id for all."""
    model = WatchedModel()
    async with picture_fleet(model) as fleet, httpx.AsyncClient(timeout=20, verify=False) as client:

        async def draw(seed: int) -> httpx.Response:
            body = {"model": PAINTER, "prompt": f"star {seed % 3}", "seed": seed, "steps": (10, 20)[seed % 2]}
            headers = {"x-request-id": "the-same"}
            return await client.post(f"{fleet.url}/v1/images/generations", json=body, headers=headers)

        together = await asyncio.gather(*(draw(seed) for seed in range(1, 9)))
        alone = [await draw(seed) for seed in range(1, 9)]

    assert {answer.status_code for answer in together} == {200}
    assert {answer.headers["x-request-id"] for answer in together} == {"the-same"}
    assert len({answer.headers["x-fleet-request-id"] for answer in together}) == 8
    assert max(len(prompts) for prompts in model.passes) > 1
    for one, lone in zip(together, alone, strict=True):
        assert one.json()["data"] == lone.json()["data"]


async def test_a_picture_whose_client_left_takes_no_more_steps() -> None:
    model = WatchedModel(cost_s=0.02)
    async with picture_fleet(model) as fleet:
        asking = asyncio.create_task(post(fleet, steps=1000))
        await eventually(lambda: len(model.passes) >= 3)
        asking.cancel()
        await asyncio.wait([asking])
        await eventually(lambda: not fleet.ingress.dispatcher.live)
        await eventually(lambda: fleet.broker.work.payloads([Stage.DIFFUSION_GENERATE]) == [])
        num_passes = len(model.passes)
        await asyncio.sleep(0.1)

        assert len(model.passes) <= num_passes + 1


async def test_a_killed_workers_picture_is_made_again_and_nothing_goes_back() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        undisturbed = events_of((await post(fleet, stream=True, partial_images=3, steps=40)).text)
        slow = WatchedModel(cost_s=0.008)
        await fleet.painters.pop().kill()
        first = await fleet.painter(slow)
        asking = asyncio.create_task(post(fleet, stream=True, partial_images=3, steps=40))
        await eventually(lambda: len(slow.passes) >= 25)
        fleet.painters.remove(first)
        await first.kill()
        second = WatchedModel(cost_s=0.005)
        await fleet.painter(second)
        fleet.broker.redeliver()
        disturbed = events_of((await asking).text)

    assert len(second.passes) == 40
    ratios = [event["done_ratio"] for _, event in disturbed if "done_ratio" in event]
    assert ratios == sorted(ratios)

    def pictures(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [{**event, "created_at": 0} for _, event in events if "b64_json" in event]

    assert pictures(disturbed) == pictures(undisturbed)


async def test_a_picture_the_store_lost_before_it_was_read_is_made_again() -> None:
    model = WatchedModel()
    async with picture_fleet(model) as fleet:
        get, lost = fleet.store.get, []

        async def lossy(ref: TensorRef) -> Any:
            if ref.dtype == "uint8" and not lost and model.passes:
                lost.append(ref)
                raise TensorNotFoundError(ref, "wiped")
            return await get(ref)

        fleet.store.get = lossy  # type: ignore[method-assign]
        answer = await post(fleet, n=2, size="128x96")
        fleet.store.get = get  # type: ignore[method-assign]
        again = await post(fleet, n=2, size="128x96")

    assert len(lost) == 1
    assert answer.json()["data"] == again.json()["data"]


async def test_a_failing_picture_is_an_error_for_its_client_only() -> None:
    async with picture_fleet(ScriptedModel({"fail_prompts": ["bad"]}), request_timeout_s=3.0) as fleet:
        bad, good = await asyncio.gather(post(fleet, prompt="bad"), post(fleet))

    assert bad.status_code >= 500
    assert good.status_code == 200


async def test_what_the_worker_refuses_is_a_4xx_in_a_stream_too() -> None:
    class Picky(ScriptedModel):
        def begin(self, request: Any) -> Any:
            from fleet_common.errors import InvalidInputError

            raise InvalidInputError("The model takes 77 tokens.", param="prompt", code="context_length_exceeded")

    async with picture_fleet(Picky({})) as fleet:
        answer = await post(fleet, stream=True)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_messages_of_a_request_carry_no_pixels() -> None:
    sizes: list[int] = []
    async with picture_fleet(ScriptedModel({})) as fleet:
        publish = fleet.broker.publish

        def counted(message: Any) -> int:
            sizes.append(len(message.payload))
            return publish(message)

        fleet.broker.publish = counted  # type: ignore[method-assign]
        noise = await post(fleet, size="128x96", n=8)

    assert noise.status_code == 200
    assert max(sizes) < 8192


async def test_nothing_of_a_request_stays_in_the_store() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        await post(fleet, size="128x96", n=3, stream=True, partial_images=2)
        await eventually(lambda: sum(stats.num_tensors for stats in fleet.store.stats().values()) == 0)
