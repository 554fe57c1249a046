"""The small pure parts: when a picture is shown on its way, the cache, the limits."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_common.errors import InvalidInputError
from fleet_contracts.diffusion import DiffusionParams
from fleet_diffusion.core.cache import ByteCache
from fleet_diffusion.core.files import encode_picture
from fleet_diffusion.core.limits import Caps, ModelFacts, check_params, picture_limits
from fleet_diffusion.core.partials import partial_steps

FACTS = ModelFacts("r", 64, 64, 8, 50, 7.5)
CAPS = Caps(max_side=128, max_pixels=128 * 96, max_steps=60, max_pictures=4, max_prompt_chars=1000)


def test_partial_pictures_are_spread_evenly_and_never_the_last() -> None:
    assert partial_steps(20, 3) == (5, 10, 15)
    assert partial_steps(20, 0) == ()
    assert partial_steps(1, 3) == ()
    assert partial_steps(3, 3) == (1, 2)


def test_the_longest_unused_value_goes_first() -> None:
    cache: ByteCache[str] = ByteCache(20)
    cache.put(("a",), "A", 10)
    cache.put(("b",), "B", 10)
    cache.get(("a",))
    cache.put(("c",), "C", 10)

    assert [cache.get((name,)) for name in "abc"] == ["A", None, "C"]
    assert cache.used_bytes == 20


def test_a_value_above_the_capacity_is_not_kept() -> None:
    cache: ByteCache[str] = ByteCache(5)
    cache.put(("a",), "A", 10)

    assert cache.get(("a",)) is None


def test_what_a_request_does_not_name_is_the_models_own_or_the_operators() -> None:
    own = picture_limits(FACTS, CAPS)
    other = picture_limits(FACTS, Caps(128, 128 * 96, 60, 4, 1000, default_steps=20, default_guidance=3.0))

    assert (own.default_steps, own.default_guidance) == (50, 7.5)
    assert (other.default_steps, other.default_guidance) == (20, 3.0)


def test_caps_that_leave_out_the_models_own_size_are_refused() -> None:
    with pytest.raises(ValueError, match="64x64"):
        picture_limits(FACTS, Caps(32, 1024, 60, 4, 1000))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"width": 60}, "size"),
        ({"width": 0}, "size"),
        ({"width": 136}, "size"),
        ({"width": 128, "height": 128}, "size"),
        ({"num_steps": 61}, "steps"),
        ({"num_steps": 0}, "steps"),
        ({"n": 5}, "n"),
        ({"format": "bmp"}, "output_format"),
    ],
)
def test_the_worker_itself_refuses_what_is_over_its_limits(change: dict[str, int], param: str) -> None:
    params = DiffusionParams(**{"width": 64, "height": 64, **change})  # type: ignore[arg-type]

    with pytest.raises(InvalidInputError) as refused:
        check_params(params, picture_limits(FACTS, CAPS))

    assert refused.value.param == param


@pytest.mark.parametrize(
    ("file_format", "magic"), [("png", b"\x89PNG\r\n\x1a\n"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")]
)
def test_a_picture_file_is_what_it_says(file_format: str, magic: bytes) -> None:
    data = encode_picture(np.full((8, 16, 3), 200, np.uint8), file_format, 90)

    assert data.startswith(magic)
