"""Videos in a chat: which frames reach the model, what each family makes of them, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_common.errors import ContextLengthError, InvalidInputError, UnsupportedModalityError
from fleet_common.stage.port import Product, StepItem
from fleet_contracts.base import Modality
from fleet_contracts.preprocess import MediaItem, PreprocessParams, PreprocessResult
from fleet_preprocess.core.fixed_resolution import FixedResolution
from fleet_preprocess.core.internvl import InternVlTiles
from fleet_preprocess.core.limits import MediaLimits, VideoLimits
from fleet_preprocess.core.qwen_vl import QwenResolution
from fleet_preprocess.core.resize import ResizeSpec
from fleet_preprocess.core.video import DecodedVideo, decode_video
from fleet_preprocess.engine.scripted import IMAGE_ID, ScriptedPromptEngine
from fleet_preprocess.worker import PreprocessEngine
from tests.support.audio_files import encoded, tone
from tests.support.video_files import Rgb, plain, video_file

MakeItem = Callable[[Any, PreprocessParams], StepItem]
PARAM = "messages[0].content[0].video_url"


def video_part(data: bytes, **more: Any) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url, **more}}


async def prepare(
    make_item: MakeItem, *parts: dict[str, Any], limits: MediaLimits | None = None, **engine_args: Any
) -> Any:
    engine = PreprocessEngine("m", ScriptedPromptEngine(engine_args), limits or MediaLimits())
    (card,) = await engine.start()
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    (made,) = await engine.run([make_item(body, PreprocessParams())])
    await engine.close()
    assert (Modality.VIDEO in card.input_modalities) == (engine_args.get("image_tokens") != 0)
    return made


def only_medium(made: Any) -> MediaItem:
    assert isinstance(made, Product), made
    assert isinstance(made.result, PreprocessResult)
    (item,) = made.result.media
    return item


def greys(video: DecodedVideo) -> list[int]:
    """The grey of each kept frame."""
    return [round(float(frame.mean())) for frame in video.frames]


def decode(data: bytes, **limits: Any) -> DecodedVideo:
    return decode_video(data, replace(VideoLimits(), **limits), param=PARAM)


def refusal(data: bytes, **limits: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        decode(data, **limits)
    assert caught.value.param == PARAM
    return caught.value.code


def ramp(num_frames: int) -> bytes:
    """Losslessly, frame number n has the grey 2n."""
    return raw([plain(2 * n) for n in range(num_frames)])


def raw(frames: Sequence[Rgb], rate_hz: int = 10) -> bytes:
    return video_file(frames, rate_hz, "avi", "rawvideo", "bgr24")


def test_a_frame_of_every_half_second_is_kept() -> None:
    video = decode(ramp(40))

    assert greys(video) == [0, 10, 20, 30, 40, 50, 60, 70]
    assert video.times_s == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    assert (video.duration_s, video.width, video.height) == (4.0, 64, 64)


@pytest.mark.parametrize(("num_frames", "most", "kept"), [(100, 16, 10), (100, 8, 5), (100, 1, 1), (1, 16, 1)])
def test_under_a_cap_the_frames_stay_evenly_spread(num_frames: int, most: int, kept: int) -> None:
    video = decode(ramp(num_frames), max_frames=most)

    assert len(video.frames) == kept <= most
    steps = np.diff(video.times_s)
    assert kept < 2 or steps == pytest.approx(steps[0])
    assert greys(video) == [round(20 * time_s) for time_s in video.times_s]


def test_frames_are_chosen_by_their_times_not_by_their_numbers() -> None:
    times = [*range(10), 30, 31, 32, 60]  # a tenth of a second each

    video = decode(video_file([plain(10 * n) for n in range(14)], container="matroska", codec="ffv1", times=times))

    assert video.times_s == pytest.approx((0.0, 0.5, 3.0, 6.0), abs=0.01)
    assert [round(grey, -1) for grey in greys(video)] == [0, 50, 100, 130]


async def test_m29_a_file_with_fewer_frames_than_its_header_says_is_read_as_it_is(
    cases_dir: Path, make_item: MakeItem
) -> None:
    made = await prepare(make_item, video_part((cases_dir / "m29_claims32_has31.avi").read_bytes()))

    item = only_medium(made)
    assert (item.kind, item.part, item.mode) == ("video", PARAM, "RGB")
    assert item.grid is not None
    assert made.tensors["pixels0"].shape == (item.grid[0], 3, 64, 64)
    assert 0 < item.grid[0] <= 16


async def test_a_video_is_one_place_in_the_prompt_and_as_many_tokens_as_its_frames(make_item: MakeItem) -> None:
    made = await prepare(make_item, video_part(ramp(20)), {"type": "text", "text": "x"}, video_part(ramp(30)))

    assert isinstance(made, Product)
    first, second = made.result.media
    assert (first.grid, first.num_tokens, first.duration_s) == ((4, 1, 1), 64, 2.0)
    assert (second.grid, second.num_tokens, second.duration_s) == ((6, 1, 1), 96, 3.0)
    assert (first.width, first.height, first.source_width) == (64, 64, 64)
    prompt = made.tensors["prompt"]
    assert (prompt == IMAGE_ID).sum() == 2
    assert made.result.num_prompt_tokens == prompt.size - 2 + 64 + 96
    assert (made.tensors["pixels0"].shape, made.tensors["pixels0"].dtype) == ((4, 3, 64, 64), np.uint8)
    assert made.hashes["pixels0"] != made.hashes["pixels1"]


async def test_equal_frames_share_their_content_hash_whatever_the_container(make_item: MakeItem) -> None:
    frames = [plain(40), plain(200)]
    files = [raw(frames, 2), video_file(frames, 2, "matroska", "ffv1", "bgr0")]

    hashes = [(await prepare(make_item, video_part(data))).hashes["pixels0"] for data in files]

    assert hashes[0] == hashes[1]


def test_every_family_has_its_own_tokens_for_frames() -> None:
    frames = np.stack([plain(grey, 60, 100) for grey in (0, 100, 200)])
    fixed = FixedResolution(ResizeSpec(height=32, width=32), num_tokens=16, grid_side=4).prepare_frames(frames, 0)
    tiles = InternVlTiles(side_px=32, patch_px=8, tokens_per_tile=4).prepare_frames(frames, 0)
    pairs = QwenResolution(min_pixels=56 * 56).prepare_frames(frames, 0)

    assert (fixed.pixels.shape, fixed.num_tokens, fixed.grid) == ((3, 32, 32, 3), 48, (3, 4, 4))
    assert (tiles.pixels.shape, tiles.num_tokens, tiles.grid) == ((3, 32, 32, 3), 12, (3, 4, 4))
    assert (pairs.pixels.shape, pairs.num_tokens, pairs.grid) == ((4, 56, 112, 3), 2 * 2 * 4, (2, 4, 8))
    assert [int(frame.mean()) for frame in pairs.pixels] == [0, 100, 200, 200]


@pytest.mark.parametrize(("asked", "most"), [(0, 28 * 28 * 768), (28 * 28 * 9, 28 * 28 * 9), (10**9, 28 * 28 * 768)])
def test_frames_of_qwen_have_a_budget_of_their_own(asked: int, most: int) -> None:
    made = QwenResolution().prepare_frames(np.zeros((1, 1000, 1000, 3), np.uint8), asked)

    assert made.pixels.shape[0] == 2
    assert 0.8 * most < made.pixels.shape[1] * made.pixels.shape[2] <= most


def test_a_phone_video_is_turned_upright() -> None:
    wide = np.zeros((48, 96, 3), np.uint8)
    wide[:, :48] = 255  # left half white

    video = decode(_rotated(video_file([wide] * 3, codec="mpeg4")))

    assert video.frames.shape == (1, 96, 48, 3)
    assert (video.width, video.height) == (48, 96)
    top, bottom = video.frames[0, :48].mean(), video.frames[0, 48:].mean()
    assert (top > 200, bottom < 50) == (True, True)


def _rotated(mp4: bytes) -> bytes:
    """The same file whose track says: turn clockwise by 90 degrees, left becomes top (`tkhd` holds the matrix)."""
    place = mp4.index(b"tkhd") + 4 + 40
    matrix = b"".join(
        value.to_bytes(4, "big", signed=True) for value in (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    )
    return mp4[:place] + matrix + mp4[place + 36 :]


def test_large_frames_are_kept_small() -> None:
    video = decode(video_file([plain(9, 1080, 1920)]))

    assert (video.width, video.height) == (1920, 1080)
    _, height, width, _ = video.frames.shape
    assert 0.9 * 2**20 < height * width <= 2**20
    assert width / height == pytest.approx(16 / 9, rel=0.01)


@pytest.mark.parametrize(
    ("data", "limits", "code"),
    [
        (b"", {}, "invalid_video"),
        (b"not a video at all" * 99, {}, "invalid_video"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", {}, "invalid_video"),
        (ramp(3)[:300], {}, "invalid_video"),
        (encoded(tone(0.2), "ogg", "libopus", 48_000), {}, "no_video_stream"),
        (ramp(21), {"max_s": 1.9}, "video_too_long"),
        (ramp(3), {"max_bytes": 100}, "video_too_large"),
        (ramp(3), {"max_pixels": 64 * 63}, "video_too_large"),
        (ramp(9), {"max_decoded_pixels": 64 * 64 * 8}, "video_too_large"),
        (video_file([plain(1, 16, 640)]), {"max_aspect_ratio": 39.9}, "video_bad_aspect"),
    ],
)
def test_what_is_no_video_or_too_much_of_one_is_refused(data: bytes, limits: dict[str, Any], code: str) -> None:
    assert refusal(data, **limits) == code


def test_a_damaged_packet_leaves_a_gap() -> None:
    data = video_file([plain(2 * n) for n in range(40)], container="matroska", codec="mjpeg", pix_fmt="yuvj420p")
    middle = len(data) // 2

    video = decode(data[:middle] + bytes(300) + data[middle + 300 :])

    assert len(video.frames) >= 6


async def test_limits_name_the_part(make_item: MakeItem) -> None:
    limits = MediaLimits(max_images=1)

    two = await prepare(make_item, video_part(ramp(3)), video_part(ramp(3)), limits=limits)
    blind = await prepare(make_item, video_part(ramp(3)), image_tokens=0)
    small = await prepare(make_item, video_part(ramp(40)), context_tokens=100)
    broken = await prepare(make_item, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,%%"}})

    assert isinstance(two, ContextLengthError)
    assert isinstance(blind, UnsupportedModalityError)
    assert blind.param == PARAM
    assert isinstance(small, ContextLengthError)
    assert isinstance(broken, InvalidInputError)
    assert (broken.code, broken.param) == ("invalid_video", PARAM)


async def test_a_budget_makes_frames_coarser_and_is_part_of_the_content_hash(make_item: MakeItem) -> None:
    frames = [np.tile(np.asarray([[[0] * 3, [255] * 3]], np.uint8), (64, 32, 1))]
    data = raw(frames)

    free, small = [await prepare(make_item, video_part(data, **more)) for more in ({}, {"max_pixels": 64})]

    assert (only_medium(free).max_pixels, only_medium(small).max_pixels) == (0, 64)
    assert free.hashes != small.hashes
    assert small.tensors["pixels0"].std() < free.tensors["pixels0"].std()
