"""Media rows of shared/cases (M01-M18, C10, C16, S01, S05, S09) through HTTP; depth is in services/preprocess/tests."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from io import BytesIO

import pytest
from PIL import Image

from tests.support.cases import IMAGE_PARAM, MODEL, CaseClient, chunks_of, error_of

pytestmark = pytest.mark.e2e


def prompt_tokens(cases: CaseClient, name: str) -> int:
    response = cases.picture(name)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens"])


def test_m01_orientation_is_applied(cases: CaseClient) -> None:
    upright = cases.sha256("m01_upright.png")

    assert {cases.sha256(f"m01_exif_{tag}.png") for tag in range(1, 9)} == {upright}
    counts = {prompt_tokens(cases, f"m01_exif_{tag}.{kind}") for tag in range(1, 9) for kind in ("png", "jpg")}
    assert counts == {prompt_tokens(cases, "m01_upright.png")}


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("m03_rgba_black_on_clear.png", "m03_twin_white.png"),
        ("m09_anim.gif", "m09_frame0.png"),
        ("m10_still.webp", "control_rgb.png"),
        ("m06_cmyk.jpg", "control_rgb.png"),
    ],
)
def test_m03_m06_m09_m10_the_encoder_sees_the_twin(cases: CaseClient, name: str, twin: str) -> None:
    assert cases.sha256(name) == cases.sha256(twin)


def test_m07_palette_transparency_is_composited_on_white(cases: CaseClient) -> None:
    with Image.open(cases.files / "m07_palette_trns.png") as image:
        rgba = image.convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    png = BytesIO()
    flat.save(png, "PNG")

    expected = cases.sha256("data:image/png;base64," + b64encode(png.getvalue()).decode())

    assert cases.sha256("m07_palette_trns.png") == expected


@pytest.mark.parametrize("name", ["m10_still.webp", "m12_still.avif", "m09_anim.gif", "m06_cmyk.jpg"])
def test_m10_m12_no_picture_is_dropped_silently(cases: CaseClient, name: str) -> None:
    text_only = cases.chat([{"type": "text", "text": "colour?"}], max_tokens=1).json()["usage"]["prompt_tokens"]
    begun_s = time.monotonic()

    response = cases.picture(name)

    assert response.json()["usage"]["prompt_tokens"] > text_only + cases.seen(response)["num_tokens"] - 1
    assert time.monotonic() - begun_s < 5.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["m13_26x41.png", "m13_25x300.png", "m15_1000x5.png"])
def test_m13_m15_small_and_long_pictures_are_scaled(cases: CaseClient, name: str, stream: bool) -> None:
    before = cases.fleet.stack()["processes"]

    response = cases.picture(name, stream=stream)

    assert response.status_code == 200, response.text
    assert not stream or chunks_of(response)
    assert cases.fleet.stack()["processes"] == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("m15_1200x5.png", "image_bad_aspect"),
        ("m16_truncated.jpg", "invalid_image"),
        ("m16_header_only.jpg", "invalid_image"),
        ("s09_bomb_20000.png", "image_too_large"),
        ("s09_header_lie.png", "image_too_large"),
    ],
)
def test_m15_m16_s09_bad_pictures_are_refused_before_any_stream(
    cases: CaseClient, name: str, code: str, stream: bool
) -> None:
    error = error_of(cases.picture(name, stream=stream), 400)

    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, IMAGE_PARAM)


def test_m18_parameters_of_a_data_url_change_nothing(cases: CaseClient) -> None:
    body = json.loads((cases.files / "req/m18_charset.json").read_bytes())
    url = body["messages"][0]["content"][1]["image_url"]["url"]
    assert ";charset=utf-8;" in url

    with_parameter = cases.post(json.dumps({**body, "model": MODEL}).encode())
    without = cases.picture(url.replace(";charset=utf-8", ""), max_tokens=16)

    assert cases.seen(with_parameter)["sha256"] == cases.seen(without)["sha256"]
    assert with_parameter.json()["choices"] == without.json()["choices"]
    assert with_parameter.json()["usage"] == without.json()["usage"]


def test_c10_a_picture_above_the_brokers_payload_travels_by_reference(cases: CaseClient) -> None:
    body = json.loads((cases.files / "req/c10_large_image.json").read_bytes())

    seen = cases.seen(cases.post(json.dumps({**body, "model": MODEL}).encode()))

    assert (seen["source_width"], seen["source_height"]) == (900, 900)


def test_c16_equal_indices_of_other_palettes_are_other_pictures(cases: CaseClient) -> None:
    first, second = (cases.seen(cases.picture(f"c16_palette_{name}.png")) for name in "ab")

    assert first["sha256"] != second["sha256"]
    assert (first["cache_hit"], second["cache_hit"]) == (False, False)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8222/varz",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "file:///etc/passwd",
        "file:///nowhere/at/all",
        "file://localhost/etc/hostname",
    ],
)
def test_s01_s05_urls_that_lead_inside_are_refused_alike(cases: CaseClient, url: str) -> None:
    error = error_of(cases.picture(url), 400)

    assert (error["code"], error["param"]) == ("url_not_allowed", IMAGE_PARAM)
    assert url not in error["message"]
