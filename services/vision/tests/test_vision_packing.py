"""Images of different sizes in one pass: which share one, and what the tower makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_common.stage.port import StepItem
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import Modality
from fleet_contracts.preprocess import PreprocessResult
from fleet_vision.core.batches import BatchLimits, batches_by_shape, packed_batches
from fleet_vision.core.patches import to_patches
from fleet_vision.engine.port import EncoderImage
from fleet_vision.engine.scripted import ScriptedEncoder
from fleet_vision.worker import VisionEngine
from tests.support.tiny_models import AUDIO_MEL_BINS, WRITERS

MakeItem = Callable[..., StepItem]


@given(
    num_patches=st.lists(st.integers(1, 200).map(lambda tokens: 4 * tokens), max_size=40),
    max_images=st.integers(1, 9),
    max_patches=st.integers(0, 900),
    align=st.integers(1, 64),
)
def test_packs_keep_their_bounds_and_waste_nothing_but_alignment(
    num_patches: list[int], max_images: int, max_patches: int, align: int
) -> None:
    batches = packed_batches(num_patches, BatchLimits(max_images, max_patches, align), 4)

    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(num_patches)))
    for batch in batches:
        assert len(batch.indices) <= max_images
        assert len(batch.indices) == 1 or not max_patches or batch.num_needed <= max_patches
        assert batch.num_needed == sum(num_patches[i] for i in batch.indices)
        assert batch.num_padding % 4 == 0
        assert batch.num_computed % (-(-align // 4) * 4 if align > 1 else 1) == 0
        assert batch.num_padding < align + 4
    lengths = [num_patches[i] for batch in batches for i in batch.indices]
    assert lengths == sorted(lengths, reverse=True)


def test_frames_of_videos_count_like_pictures_and_stay_together() -> None:
    shapes = [(3, 4, 4), (5, 3, 4, 4), (3, 4, 4), (5, 3, 4, 4), (5, 3, 4, 4), (30, 3, 4, 4), (128, 3000)]

    batches = batches_by_shape(shapes, [1] * len(shapes), BatchLimits(max_images=10))

    assert [batch.indices for batch in batches] == [(0, 2), (1, 3), (4,), (5,), (6,)]


def with_grids(item: StepItem, *grids: tuple[int, int, int]) -> StepItem:
    """The step with these patch grids of its images."""
    pre = item.task.inputs["pre"]
    assert isinstance(pre.result, PreprocessResult)
    media = tuple(msgspec.structs.replace(m, grid=grid) for m, grid in zip(pre.result.media, grids, strict=True))
    pre = msgspec.structs.replace(pre, result=msgspec.structs.replace(pre.result, media=media))
    task = msgspec.structs.replace(item.task, inputs={"pre": pre})
    return StepItem(task=task, attempt=item.attempt, tensors=item.tensors)


@pytest.mark.parametrize(("align", "computed"), [(1, 40.0), (32, 64.0)])
async def test_one_pass_takes_all_sizes_and_its_patches_are_counted(
    item: MakeItem, align: int, computed: float
) -> None:
    metrics = WorkerMetrics()
    passes: list[tuple[list[str], int]] = []

    class Packing(ScriptedEncoder):
        def encode(self, images: list[EncoderImage], num_padding: int = 0) -> list[np.ndarray]:
            passes.append(([image.content_hash[0] for image in images], num_padding))
            return super().encode(images, num_padding)

    limits = BatchLimits(8, align=align)
    engine = VisionEngine("vlm", Packing({"packing_unit": 4}), metrics, cache_bytes=0, limits=limits)
    await engine.start()
    small, wide = np.zeros((3, 28, 28), np.uint8), np.zeros((3, 28, 252), np.uint8)
    steps = [item(["a" * 64], pixels=[small]), item(["b" * 64], pixels=[wide])]

    await engine.run([with_grids(steps[0], (1, 2, 2)), with_grids(steps[1], (1, 2, 18))])

    def patches(kind: str) -> float | None:
        return metrics.registry.get_sample_value("fleet_vision_patches_total", {"kind": kind})

    assert passes == [(["b", "a"], int(computed) - 40)]
    assert (patches("needed"), patches("computed")) == (40.0, computed)


def test_patches_of_a_token_lie_beside_each_other() -> None:
    rows, columns = np.mgrid[0:4, 0:8]
    pixels = np.stack([10.0 * rows + columns] * 3).astype(np.float32)

    patches, grid = to_patches(pixels[None], 2, 2, 2)

    assert (patches.shape, grid) == ((8, 24), (1, 2, 4))
    assert patches[:, 0].tolist() == [0, 2, 20, 22, 4, 6, 24, 26]
    assert patches[0].reshape(3, 2, 2, 2)[1, 1].tolist() == [[0, 1], [10, 11]]


def test_patches_of_frames_hold_what_lies_at_one_place_one_after_the_other() -> None:
    random = np.random.default_rng(1)
    frames = random.standard_normal((3, 3, 8, 12)).astype(np.float32)

    patches, grid = to_patches(frames, 2, 2, 2)

    assert grid == (2, 4, 6)
    padded = np.concatenate([frames, frames[-1:]])
    expected = [
        padded[2 * step : 2 * step + 2, :, 4 * i + 2 * a :, 4 * j + 2 * b :][:, :, :2, :2].transpose(1, 0, 2, 3).ravel()
        for step in range(2)
        for i in range(2)
        for j in range(3)
        for a in range(2)
        for b in range(2)
    ]
    assert (patches == np.stack(expected)).all()


def test_pixels_that_are_no_whole_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="30x28"):
        to_patches(np.zeros((1, 3, 28, 30), np.float32), 14, 2, 2)


SIZES = {
    "qwen2_vl": [(56, 84), (280, 28), (4, 3, 28, 28), (140, 196)],
    "qwen2_5_vl": [(56, 84), (280, 28), (28, 28), (140, 196)],
    "internvl": [(1,), (5,), (3,)],
}


@pytest.mark.models
@pytest.mark.parametrize("family", list(SIZES))
@pytest.mark.parametrize("align", [1, 64])
def test_packed_equals_one_by_one(family: str, align: int, tmp_path: Path) -> None:
    from fleet_vision.engine.real import CheckpointEncoder

    encoder = CheckpointEncoder(str(WRITERS[family](tmp_path)), {}, num_threads=1)
    facts = encoder.load()
    random = np.random.default_rng(0)
    shapes = [(*size, 3, 32, 32) if len(size) == 1 else (3, *size)[-4:] for size in SIZES[family]]
    images = [EncoderImage(random.integers(0, 256, shape, dtype=np.uint8), "", 0) for shape in shapes]
    num_padding = -7 % align // facts.packing_unit * facts.packing_unit

    together = encoder.encode(images, num_padding)
    alone = [encoder.encode([image])[0] for image in images]

    assert facts.packing_unit > 0
    assert [one.shape for one in together] == [one.shape for one in alone]
    assert all(one.shape[1] == facts.hidden_size for one in together)
    assert max(np.abs(a - b).max() for a, b in zip(together, alone, strict=True)) < 1e-4
    assert np.std(together[0]) > 0.1


@pytest.mark.models
@pytest.mark.parametrize(("family", "shape"), [("llava", (3, 32, 32)), ("internvl", (1, 3, 32, 32))])
def test_frames_of_a_video_are_seen_as_pictures_are(family: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    from fleet_vision.engine.real import CheckpointEncoder

    encoder = CheckpointEncoder(str(WRITERS[family](tmp_path)), {}, num_threads=1)
    facts = encoder.load()
    frames = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)

    videos = encoder.encode([EncoderImage(frames, "", 0), EncoderImage(frames[::-1].copy(), "", 0)])
    pictures = [encoder.encode([EncoderImage(frame.reshape(shape), "", 0)])[0] for frame in frames]

    assert Modality.VIDEO in facts.media
    assert np.abs(videos[0] - np.concatenate(pictures)).max() < 1e-4
    assert np.abs(videos[1] - np.concatenate(pictures[::-1])).max() < 1e-4


@pytest.mark.models
def test_recordings_in_a_batch_hear_only_themselves(tmp_path: Path) -> None:
    """What lies behind the end of one makes no difference to its embeddings, but for the convolution's edge."""
    from fleet_vision.engine.real import CheckpointEncoder

    encoder = CheckpointEncoder(str(WRITERS["qwen2_audio"](tmp_path)), {}, num_threads=1)
    facts = encoder.load()
    random = np.random.default_rng(0)
    sizes = [(50, 25), (749, 374), (1500, 750)]
    features = [random.uniform(-1, 1, (AUDIO_MEL_BINS, 3000)).astype(np.float32) for _ in sizes]
    recordings = [
        EncoderImage(one, "", num_tokens, positions)
        for one, (positions, num_tokens) in zip(features, sizes, strict=True)
    ]
    noisy = features[0].copy()
    noisy[:, 2 * 50 + 4 :] = 9.0

    together = encoder.encode(recordings)
    alone = [encoder.encode([one])[0] for one in recordings]
    (with_noise,) = encoder.encode([EncoderImage(noisy, "", 25, 50)])

    assert (facts.media, facts.packing_unit) == ((Modality.AUDIO,), 0)
    assert [one.shape for one in together] == [(num_tokens, facts.hidden_size) for _, num_tokens in sizes]
    assert max(np.abs(a - b).max() for a, b in zip(together, alone, strict=True)) < 1e-4
    assert np.abs(with_noise - alone[0]).max() < 1e-4
    assert np.std(together[0]) > 0.1
