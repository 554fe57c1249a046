"""From a form with pictures to its answer: ingress, preprocess and step scheduler together."""

from __future__ import annotations

import base64
import io

import httpx
import numpy as np
from openai import AsyncOpenAI
from PIL import Image

from fleet_diffusion.engine.scripted import ScriptedModel
from tests.support.painters import PAINTER, TEXT_MODEL, PictureFleet, picture_fleet

FIELDS = {"model": PAINTER, "prompt": "a red star", "seed": "5", "steps": "6"}


def png(colour: str, side: int = 64) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(out, "PNG")
    return out.getvalue()


A, B = png("red"), png("blue", 80)


def pixels(b64: str | None) -> np.ndarray:
    assert b64 is not None
    return np.array(Image.open(io.BytesIO(base64.b64decode(b64))).convert("RGB"))


async def edit(fleet: PictureFleet, *files: tuple[str, bytes], **fields: str) -> httpx.Response:
    parts = [(name, ("a.png", data)) for name, data in files]
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        return await client.post(f"{fleet.url}/v1/images/edits", data={**FIELDS, **fields}, files=parts)


async def test_the_client_sends_one_picture_or_several_and_they_arrive_in_order() -> None:
    """Case A26."""
    async with picture_fleet(ScriptedModel({})) as fleet, httpx.AsyncClient(verify=False) as http:
        client = AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none")
        more = {"seed": 5, "steps": 6}
        one = await client.images.edit(model=PAINTER, image=A, prompt="a red star", extra_body=more)
        two = await client.images.edit(model=PAINTER, image=[A, B], prompt="a red star", extra_body=more)
        raw = await edit(fleet, ("image[]", A))
        back = await edit(fleet, ("image[]", B), ("image[]", A))
        report = await http.get(f"{fleet.url}/v1/requests/{back.headers['x-fleet-request-id']}")

    assert one.data is not None
    assert two.data is not None
    assert raw.json()["data"][0]["b64_json"] == one.data[0].b64_json
    assert len({one.data[0].b64_json, two.data[0].b64_json, back.json()["data"][0]["b64_json"]}) == 3
    media = [(item["part"], item["source_width"]) for item in report.json()["media"]]
    assert media == [("image[0]", 80), ("image[1]", 64)]


async def test_what_a_mask_keeps_stays() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :32] = 255
    out = io.BytesIO()
    Image.fromarray(mask).save(out, "PNG")
    async with picture_fleet(ScriptedModel({})) as fleet:
        answer = await edit(fleet, ("image", A), ("mask", out.getvalue()), strength="1", n="2")

    for datum in answer.json()["data"]:
        made = pixels(datum["b64_json"])
        assert (made[:, 32:] == (255, 0, 0)).all()
        assert (made[:, :32] != (255, 0, 0)).any()


async def test_an_edit_is_answered_as_a_url_or_a_stream_too() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet, httpx.AsyncClient(verify=False) as http:
        kept = (await edit(fleet, ("image", A), response_format="url")).json()["data"][0]
        inline = (await edit(fleet, ("image", A))).json()["data"][0]
        file = (await http.get(kept["url"])).content
        stream = (await edit(fleet, ("image", A), stream="true", partial_images="1")).text

    assert file == base64.b64decode(inline["b64_json"])
    assert "event: image_edit.partial_image" in stream
    assert "event: image_edit.completed" in stream


BAD: tuple[tuple[tuple[tuple[str, bytes], ...], dict[str, str], str], ...] = (
    ((("mask", A),), {}, "image"),
    ((("image", b""),), {}, "image"),
    ((("image", b"no picture"),), {}, "image"),
    ((("image", A), ("image", b"no picture")), {}, "image[1]"),
    ((("image", A), ("mask", png("white", 32))), {}, "mask"),
    ((("image", A), ("mask", png("black"))), {}, "mask"),
    ((("image", A),) * 5, {}, "image"),
    ((("image", A), ("picture", A)), {}, "picture"),
    ((("image", A),), {"strength": "0"}, "strength"),
    ((("image", A),), {"strength": "nan"}, "strength"),
    ((("image", A),), {"size": "7x7"}, "size"),
    ((("image", A),), {"n": "many"}, "n"),
    ((("image", A),), {"colour": "red"}, "colour"),
    ((("image", A),), {"image": "a text"}, "image"),
    ((("image", A),), {"model": TEXT_MODEL}, "model"),
)


async def test_what_is_wrong_is_named() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        answers = [await edit(fleet, *files, **fields) for files, fields, _ in BAD]

    told = [(answer.status_code, answer.json()["error"]["param"]) for answer in answers]
    assert told == [(400, param) for _, _, param in BAD]


async def test_a_model_that_cannot_encode_pictures_refuses_edits() -> None:
    async with picture_fleet(ScriptedModel({"takes_images": False})) as fleet:
        answer = await edit(fleet, ("image", A))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
