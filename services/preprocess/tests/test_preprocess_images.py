"""Every odd image file of the failure cases, as the encoder would see it."""

from __future__ import annotations

import base64
import io
import json
import resource
import struct
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleet_common.errors import FleetError, InvalidInputError
from fleet_common.stage.port import Product

Run = Callable[..., Awaitable[Product | FleetError]]


def pixels_of(result: Product | FleetError, index: int = 0) -> np.ndarray:
    """uint8 [height, width, 3] as int, for differences."""
    assert isinstance(result, Product), result
    return result.tensors[f"pixels{index}"].transpose(1, 2, 0).astype(int)


def refusal(result: Product | FleetError) -> tuple[str, str | None]:
    assert isinstance(result, InvalidInputError), result
    return result.code, result.param


PARAM = "messages[0].content[1].image_url"


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_exif_orientation_is_applied_to_png(cases_dir: Path, run_image: Run, orientation: int) -> None:
    upright = await run_image(cases_dir / "m01_upright.png")

    turned = await run_image(cases_dir / f"m01_exif_{orientation}.png")

    assert np.array_equal(pixels_of(turned), pixels_of(upright))
    assert turned.media[0] == upright.media[0]
    assert turned.hashes == upright.hashes
    assert np.array_equal(turned.tensors["prompt"], upright.tensors["prompt"])


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_exif_orientation_is_applied_to_jpeg(cases_dir: Path, run_image: Run, orientation: int) -> None:
    upright = await run_image(cases_dir / "m01_upright.png")

    turned = await run_image(cases_dir / f"m01_exif_{orientation}.jpg")

    assert np.abs(pixels_of(turned) - pixels_of(upright)).max() <= 8


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("m03_rgba_black_on_clear.png", "m03_twin_white.png"),
        ("m09_anim.gif", "m09_frame0.png"),
        ("m10_still.webp", "control_rgb.png"),
    ],
)
async def test_file_gives_the_pixels_of_its_twin(cases_dir: Path, run_image: Run, name: str, twin: str) -> None:
    expected = await run_image(cases_dir / twin)

    got = await run_image(cases_dir / name)

    assert np.array_equal(pixels_of(got), pixels_of(expected))
    assert got.media[0].sha256 == expected.media[0].sha256


async def test_cmyk_jpeg_keeps_its_colours(cases_dir: Path, run_image: Run) -> None:
    cmyk = pixels_of(await run_image(cases_dir / "m06_cmyk.jpg"))
    twin = pixels_of(await run_image(cases_dir / "m06_twin_rgb.jpg"))

    for rows in (slice(0, 32), slice(32, 64)):
        for columns in (slice(0, 32), slice(32, 64)):
            difference = cmyk[rows, columns].mean((0, 1)) - twin[rows, columns].mean((0, 1))
            assert np.abs(difference).max() <= 12


async def test_palette_alpha_is_composited_on_white(cases_dir: Path, run_image: Run) -> None:
    rgba = Image.open(cases_dir / "m07_palette_trns.png").convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))

    got = pixels_of(await run_image(cases_dir / "m07_palette_trns.png"))

    assert np.array_equal(got, np.asarray(white).astype(int))


async def test_only_the_first_of_many_frames_is_decoded(run_image: Run) -> None:
    frames = [Image.new("RGB", (64, 64), (i % 256, 0, 0)) for i in range(400)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    data = buffer.getvalue()
    cut_after_first = data[: len(data) // 4]

    got = await run_image(cut_after_first)

    assert np.array_equal(pixels_of(got), np.asarray(frames[0]).astype(int))


async def test_avif_is_read(cases_dir: Path, run_image: Run) -> None:
    expected = pixels_of(await run_image(cases_dir / "control_rgb.png"))

    got = pixels_of(await run_image(cases_dir / "m12_still.avif"))

    assert np.abs(got.mean((0, 1)) - expected.mean((0, 1))).max() <= 12


@pytest.mark.parametrize("name", ["m13_26x41.png", "m13_25x300.png", "m15_1000x5.png"])
async def test_small_and_long_images_are_scaled(cases_dir: Path, run_image: Run, name: str) -> None:
    got = await run_image(cases_dir / name)

    assert pixels_of(got).shape == (64, 64, 3)
    assert (got.media[0].source_width, got.media[0].source_height) == Image.open(cases_dir / name).size


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("m15_1200x5.png", "image_bad_aspect"),
        ("m16_truncated.jpg", "invalid_image"),
        ("m16_header_only.jpg", "invalid_image"),
        ("s09_bomb_20000.png", "image_too_large"),
        ("s09_header_lie.png", "image_too_large"),
        ("control_16k.wav", "invalid_image"),
    ],
)
async def test_bad_file_is_refused_naming_its_part(cases_dir: Path, run_image: Run, name: str, code: str) -> None:
    got = await run_image(cases_dir / name)

    assert refusal(got) == (code, PARAM)


async def test_bomb_costs_no_memory_and_no_time(cases_dir: Path, run_image: Run) -> None:
    await run_image(cases_dir / "control_rgb.png")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_cpu_s = time.process_time()

    for _ in range(8):
        await run_image(cases_dir / "s09_bomb_20000.png")

    # CPU seconds, not wall time: another process on this machine must not fail the test.
    assert time.process_time() - started_cpu_s < 0.8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50 << 10


async def test_parameters_before_base64_are_fine(cases_dir: Path, run: Run, run_image: Run) -> None:
    body = json.loads((cases_dir / "req/m18_charset.json").read_bytes())
    assert "charset=utf-8;base64" in json.dumps(body)
    expected = await run_image(cases_dir / "control_rgb.png")

    got = await run(body)

    assert np.array_equal(pixels_of(got), pixels_of(expected))


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,####",
        "data:image/png;base64,iVBORw0KGgo",
        "data:image/png;base64,iVBO\nRw0K",
        "DATA:image/png;BASE64,iVBORw0K",
    ],
)
async def test_broken_data_url_is_refused(run_image: Run, url: str) -> None:
    assert refusal(await run_image(url)) == ("invalid_image", PARAM)


async def test_file_over_the_byte_limit_is_refused_before_decoding(run_image: Run) -> None:
    got = await run_image("data:image/png;base64," + "A" * (28 << 20))

    assert refusal(got) == ("image_too_large", PARAM)


async def test_palettes_tell_pictures_apart(cases_dir: Path, run_image: Run) -> None:
    first = await run_image(cases_dir / "c16_palette_a.png")
    second = await run_image(cases_dir / "c16_palette_b.png")

    assert first.hashes["pixels0"] != second.hashes["pixels0"]
    assert first.media[0].sha256 != second.media[0].sha256
    assert len(first.hashes["pixels0"]) == 64


def png(width: int, height: int, depth: int, colour: int, row: bytes, extra: bytes = b"") -> bytes:
    def chunk(tag: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress((b"\0" + row) * height))
    return b"\x89PNG\r\n\x1a\n" + header + extra + data + chunk(b"IEND", b"")


def trns(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + b"tRNS" + body + struct.pack(">I", zlib.crc32(b"tRNS" + body))


KEY = b"\x80\0\x40\0\x20\0"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(png(8, 8, 16, 0, struct.pack(">8H", *[32896] * 8)), (128,) * 3, id="16-bit grey"),
        pytest.param(png(8, 8, 16, 0, struct.pack(">8H", *[65535] * 8)), (255,) * 3, id="16-bit grey white"),
        pytest.param(png(8, 8, 16, 0, b"\x12\x34" * 8, trns(b"\x12\x34")), (255,) * 3, id="16-bit grey clear"),
        pytest.param(png(8, 8, 16, 2, b"\x80\x00\x40\x00\xff\xff" * 8), (128, 64, 255), id="16-bit RGB"),
        pytest.param(
            png(8, 8, 16, 2, b"\x80\0\x40\0\x20\0" * 8, trns(b"\x80\0\x40\0\x20\0")), (255,) * 3, id="16-bit key"
        ),
        pytest.param(png(8, 8, 16, 6, b"\x80\x00\x40\x00\xff\xff\x00\x00" * 8), (255,) * 3, id="16-bit RGBA clear"),
        pytest.param(png(8, 8, 16, 4, b"\x40\x00\xff\xff" * 8), (64,) * 3, id="16-bit grey with alpha"),
        pytest.param(png(8, 8, 8, 0, b"\x55" * 8), (85,) * 3, id="grey"),
        pytest.param(png(8, 8, 8, 0, b"\x55" * 8, trns(b"\0\x55")), (255,) * 3, id="grey key"),
        pytest.param(png(8, 8, 8, 2, b"\x55\x44\x33" * 8, trns(b"\0\x55\0\x44\0\x33")), (255,) * 3, id="RGB key"),
        pytest.param(png(8, 8, 8, 4, b"\x00\x80" * 8), (127,) * 3, id="grey with alpha"),
        pytest.param(png(8, 8, 1, 0, b"\xff"), (255,) * 3, id="1 bit white"),
        pytest.param(png(8, 8, 1, 0, b"\x00", trns(b"\0\0")), (255,) * 3, id="1 bit key"),
        pytest.param(png(8, 8, 4, 0, b"\x77" * 4), (119,) * 3, id="4-bit grey"),
    ],
)
async def test_colour_mode_comes_out_right(run_image: Run, data: bytes, expected: tuple[int, int, int]) -> None:
    got = pixels_of(await run_image(data))

    assert tuple(got[0, 0]) == expected
    assert got.min() == min(expected)


async def test_order_of_images_is_the_order_of_parts(run: Run) -> None:
    def part(colour: str) -> dict[str, Any]:
        buffer = io.BytesIO()
        Image.new("RGB", (9, 9), colour).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}

    text = {"type": "text", "text": "and"}
    body = {
        "messages": [
            {"role": "user", "content": [part("red"), text, part("lime")]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [text, part("blue")]},
        ]
    }

    got = await run(body)

    assert [tuple(pixels_of(got, i)[0, 0]) for i in range(3)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert [item.part for item in got.media] == [
        "messages[0].content[0].image_url",
        "messages[0].content[2].image_url",
        "messages[2].content[1].image_url",
    ]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
async def test_damaged_exif_leaves_the_picture_alone(run_image: Run) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(buffer, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")

    got = await run_image(buffer.getvalue())

    assert (got.media[0].source_width, got.media[0].source_height) == (20, 10)


async def test_pixel_budget_shrinks_and_changes_the_content_hash(cases_dir: Path, run_image: Run) -> None:
    whole = await run_image(cases_dir / "control_rgb.png")

    shrunk = await run_image(cases_dir / "control_rgb.png", max_pixels=100)

    assert pixels_of(shrunk).shape == (64, 64, 3)
    assert shrunk.hashes != whole.hashes


async def test_noise_never_raises_anything_but_a_refusal(cases_dir: Path, run_image: Run) -> None:
    random = np.random.default_rng(5)
    names = ["m01_exif_6.jpg", "m07_palette_trns.png", "m09_anim.gif", "m10_still.webp", "m12_still.avif"]
    files = [(cases_dir / name).read_bytes() for name in names]

    for _ in range(60):
        for data in files:
            broken = bytearray(data)
            for place in random.integers(0, len(broken), 6):
                broken[place] = random.integers(0, 256)
            result = await run_image(bytes(broken[: random.integers(1, len(broken) + 1)]))
            assert isinstance(result, Product | InvalidInputError)
