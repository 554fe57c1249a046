"""Pictures to be edited: decoded in order, scaled, masks understood."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fleet_common.errors import InvalidInputError
from fleet_contracts import codec
from fleet_contracts.preprocess import EditFiles, PreprocessParams
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.picture_worker import PicturePreprocessEngine

PARAMS = PreprocessParams(route="edit", width=8, height=16)


def png(array: np.ndarray, mode: str | None = None) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array, mode).save(out, "PNG")
    return out.getvalue()


def flat(value: int, side: int = 32) -> np.ndarray:
    return np.full((side, side, 3), value, np.uint8)


def prepare(*images: bytes, mask: bytes = b""):  # type: ignore[no-untyped-def]
    engine = PicturePreprocessEngine("painter", MediaLimits())
    return engine.prepare(codec.encode(EditFiles(images=images, mask=mask)), PARAMS)


def test_pictures_arrive_in_order_and_of_the_size_asked_for() -> None:
    """Case A26."""
    product = prepare(png(flat(10)), png(flat(200, 64)))

    assert [product.tensors[f"image{i}"].shape for i in range(2)] == [(16, 8, 3)] * 2
    assert [int(product.tensors[f"image{i}"][0, 0, 0]) for i in range(2)] == [10, 200]
    assert [(item.part, item.source_width) for item in product.media] == [("image[0]", 32), ("image[1]", 64)]


def masks() -> dict[str, bytes]:
    light = np.zeros((32, 32), np.uint8)
    light[:, :16] = 255
    alpha = np.zeros((32, 32, 4), np.uint8)
    alpha[:, 16:, 3] = 255
    return {"light": png(light), "alpha": png(alpha)}


@pytest.mark.parametrize("kind", ["light", "alpha"])
def test_transparent_or_light_pixels_may_change(kind: str) -> None:
    mask = prepare(png(flat(10)), mask=masks()[kind]).tensors["mask"]

    assert mask.shape == (16, 8)
    assert mask[:, :4].all()
    assert not mask[:, 4:].any()


def test_one_pixel_to_change_is_not_lost_when_scaled() -> None:
    mask = np.zeros((32, 32), np.uint8)
    mask[5, 5] = 255

    assert prepare(png(flat(10)), mask=png(mask)).tensors["mask"].sum() == 1


@pytest.mark.parametrize(
    ("images", "mask", "param", "code"),
    [
        ((b"no picture",), b"", "image", "invalid_image"),
        ((png(flat(1)), b"no picture"), b"", "image[1]", "invalid_image"),
        ((png(flat(1)),), b"no picture", "mask", "invalid_image"),
        ((png(flat(1)),), png(flat(255, 16)), "mask", "mask_size_mismatch"),
        ((png(flat(1)),), png(flat(0)), "mask", "empty_mask"),
    ],
)
def test_bad_files_are_named(images: tuple[bytes, ...], mask: bytes, param: str, code: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        prepare(*images, mask=mask)

    assert (refused.value.param, refused.value.code) == (param, code)
