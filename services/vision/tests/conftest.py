"""Fixtures of the vision tests: steps with pixels, as the runner would open them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fleet_common.stage.port import StepItem
from fleet_common.testing.steps import first_attempt
from fleet_contracts.base import Stage, StepId
from fleet_contracts.preprocess import MediaItem, PreprocessParams, PreprocessResult
from fleet_contracts.tensors import InlinePlace, TensorRef
from fleet_contracts.vision import AudioEncodeParams, VisionParams
from fleet_contracts.work import PlanStep, StepOutput

MakeItem = Callable[..., StepItem]


def make_item(
    hashes: Sequence[str],
    *,
    items: Sequence[int] = (0,),
    tenant: str = "t",
    pixels: Sequence[np.ndarray] | None = None,
    num_tokens: int = 16,
    kind: str = "image",
) -> StepItem:
    """A vision step over images (or recordings) with these content hashes ("" = none given)."""
    stem = "audio" if kind == "audio" else "pixels"
    chosen = AudioEncodeParams if kind == "audio" else VisionParams
    arrays = pixels or [np.full((3, 8, 8), i, np.uint8) for i in range(len(hashes))]
    refs = {
        f"{stem}{i}": TensorRef(
            place=InlinePlace(data=b""),
            dtype=str(array.dtype),
            shape=array.shape,
            nbytes=array.nbytes,
            content_hash=content_hash,
        )
        for i, (array, content_hash) in enumerate(zip(arrays, hashes, strict=True))
    }
    media = tuple(
        MediaItem(part=f"p{i}", kind=kind, width=8, height=8, mode="RGB", sha256="", num_tokens=num_tokens)
        for i in range(len(hashes))
    )
    pre = PlanStep(step_id=StepId("pre"), stage=Stage.PREPROCESS, model="vlm", params=PreprocessParams())
    enc = PlanStep(
        step_id=StepId("enc0"),
        stage=Stage.VISION_ENCODE,
        model="vlm",
        params=chosen(items=tuple(items)),
        needs=(StepId("pre"),),
    )
    result = PreprocessResult(num_prompt_tokens=20, media=media)
    inputs = {"pre": StepOutput(step_id=StepId("pre"), epoch=0, tensors=refs, result=result)}
    tensors = {("pre", f"{stem}{i}"): array for i, array in enumerate(arrays)}
    return first_attempt(enc, pre, tensors=tensors, tenant=tenant, inputs=inputs)


@pytest.fixture
def item() -> MakeItem:
    return make_item
