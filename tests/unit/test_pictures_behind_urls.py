"""`response_format: "url"`: private, expiring and unguessable, whichever ingress is asked."""

from __future__ import annotations

import base64

import httpx
import pytest

from fleet_common.clock import SystemClock
from fleet_diffusion.engine.scripted import ScriptedModel
from fleet_ingress.lifecycle import prepare_ingress
from fleet_ingress.settings import IngressSettings
from fleet_ingress.testing.rig import served
from tests.support.painters import PAINTER, PictureFleet, picture_fleet

KEYS = {"api_keys": {"acme": "sk-acme", "other": "sk-other"}}


async def drawn(fleet: PictureFleet, key: str = "", **more: object) -> dict[str, object]:
    body = {"model": PAINTER, "prompt": "a red star", "seed": 5, **more}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        answer = await client.post(f"{fleet.url}/v1/images/generations", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    datum: dict[str, object] = answer.json()["data"][0]
    return datum


async def fetched(url: object, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        return await client.get(str(url), headers=headers)


@pytest.mark.parametrize("file_format", ["png", "jpeg", "webp"])
async def test_a_url_gives_the_file_that_base64_would_be(file_format: str) -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        kept = await drawn(fleet, response_format="url", output_format=file_format)
        inline = await drawn(fleet, output_format=file_format)
        answer = await fetched(kept["url"])

    assert set(kept) == {"url", "expires_at", "seed"}
    assert str(kept["url"]).startswith(f"{fleet.url}/v1/images/files/")
    assert answer.content == base64.b64decode(str(inline["b64_json"]))
    assert answer.headers["content-type"] == f"image/{file_format}"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "private, no-store"


async def test_equal_pictures_have_urls_that_cannot_be_guessed() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        urls = [str((await drawn(fleet, response_format="url"))["url"]) for _ in range(2)]
        changed = urls[0].replace(".png", ".jpeg")
        answers = [await fetched(url) for url in (changed, f"{fleet.url}/v1/images/files/x", urls[0][:-5] + "0.png")]

    keys = [url.rpartition("/")[2].removesuffix(".png") for url in urls]
    assert keys[0] != keys[1]
    assert all(len(bytes.fromhex(key)) == 32 for key in keys)
    for answer in answers[:2]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "picture_not_found")


async def test_after_its_time_a_picture_is_gone() -> None:
    async with picture_fleet(ScriptedModel({}), image_url_ttl_s=1) as fleet:
        kept = await drawn(fleet, response_format="url")
        objects = fleet.broker.objects("fleet_pictures")
        before = await fetched(kept["url"])
        (name,) = objects.names
        later = objects._now_s() + 2
        objects._now_s = lambda: later
        after = await fetched(kept["url"])

    assert name.endswith(".png")
    assert before.status_code == 200
    assert (after.status_code, after.json()["error"]["code"]) == (404, "picture_not_found")


async def test_another_ingress_and_a_later_one_give_it_too() -> None:
    async with picture_fleet(ScriptedModel({})) as fleet:
        kept = await drawn(fleet, response_format="url")
        own = IngressSettings.model_validate({"http_port": 0})
        async with (
            prepare_ingress(own, fleet.broker.connect(), fleet.store, SystemClock()) as second,
            served(second) as url,
        ):
            answer = await fetched(str(kept["url"]).replace(fleet.url, url))

    assert answer.status_code == 200


async def test_with_keys_a_picture_is_its_tenants_own() -> None:
    async with picture_fleet(ScriptedModel({}), **KEYS) as fleet:
        kept = await drawn(fleet, "sk-acme", response_format="url")
        answers = [await fetched(kept["url"], key) for key in ("sk-acme", "sk-other", "")]

    assert [answer.status_code for answer in answers] == [200, 404, 401]


async def test_an_operator_may_open_urls_to_whoever_knows_them() -> None:
    async with picture_fleet(ScriptedModel({}), is_image_url_public=True, **KEYS) as fleet:
        kept = await drawn(fleet, "sk-acme", response_format="url")
        known, others = await fetched(kept["url"]), await fetched(f"{fleet.url}/v1/images/files/x")

    assert (known.status_code, others.status_code) == (200, 401)


async def test_the_operators_address_is_in_the_url() -> None:
    async with picture_fleet(ScriptedModel({}), public_url="https://pictures.example/") as fleet:
        kept = await drawn(fleet, response_format="url")

    assert str(kept["url"]).startswith("https://pictures.example/v1/images/files/")
