"""The feature cache before a scripted encoder, as the stage runner drives it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fleet_common.errors import ContractError, EngineError, EngineOutOfMemoryError
from fleet_common.stage.port import Product, StepItem
from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.base import Modality
from fleet_vision.app import build_engine
from fleet_vision.core.batches import BatchLimits
from fleet_vision.core.cache import FeatureCache, FeatureKey
from fleet_vision.engine.port import EncoderFacts, EncoderImage
from fleet_vision.engine.scripted import ScriptedEncoder
from fleet_vision.settings import VisionSettings
from fleet_vision.worker import VisionEngine

MakeItem = Callable[..., StepItem]
A, B, C = "a" * 64, "b" * 64, "c" * 64


class RecordingEncoder(ScriptedEncoder):
    """Remembers what it was asked for; can be held, and fails once for chosen content."""

    def __init__(self, fail_once: str = "", **engine_args: object) -> None:
        super().__init__(engine_args)
        self.calls: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._fail_once = fail_once

    def encode(self, images: Sequence[EncoderImage], num_padding: int = 0) -> list[np.ndarray]:
        self.calls.append([image.content_hash for image in images])
        assert self.gate.wait(10)
        if self._fail_once in self.calls[-1]:
            self._fail_once = ""
            raise EngineError("once")
        return super().encode(images, num_padding)


async def started(encoder: ScriptedEncoder, **settings: object) -> VisionEngine:
    engine = VisionEngine("vlm", encoder, WorkerMetrics(), **{"cache_bytes": 1 << 20, **settings})
    await engine.start()
    return engine


def hits(product: object) -> list[bool]:
    assert isinstance(product, Product), product
    assert product.result.media == product.media
    return [media.cache_hit for media in product.media]


async def test_each_picture_is_encoded_once(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    engine = await started(encoder)

    first = await engine.run([item([A]), item([B])])
    second = await engine.run([item([A]), item([C])])

    assert [hits(product) for product in (*first, *second)] == [[False], [False], [True], [False]]
    assert encoder.calls == [[A, B], [C]]
    assert np.array_equal(first[0].tensors["embeds0"], second[0].tensors["embeds0"])
    assert not np.array_equal(first[0].tensors["embeds0"], first[1].tensors["embeds0"])


async def test_output_has_names_hashes_and_sizes_of_the_items(item: MakeItem) -> None:
    engine = await started(RecordingEncoder())

    (product,) = await engine.run([item([A, B, C], items=(1, 2))])

    assert list(product.tensors) == ["embeds1", "embeds2"]
    assert product.hashes == {"embeds1": B, "embeds2": C}
    assert [media.part for media in product.media] == ["p1", "p2"]
    assert product.tensors["embeds1"].shape == (16, 576)
    assert product.tensors["embeds1"].nbytes == 16 * 576 * 4


async def test_bfloat16_takes_half_the_bytes(item: MakeItem) -> None:
    wide = await started(RecordingEncoder())
    narrow = await started(RecordingEncoder(), dtype="bfloat16")

    (expected,) = await wide.run([item([A])])
    (product,) = await narrow.run([item([A])])

    bits = product.tensors["embeds0"]
    assert (bits.dtype, bits.nbytes, product.dtypes) == (np.uint16, 16 * 576 * 2, {"embeds0": "bfloat16"})
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(values, expected.tensors["embeds0"], rtol=2**-8, atol=0)


async def test_lookups_are_counted(item: MakeItem) -> None:
    metrics = WorkerMetrics()
    engine = VisionEngine("vlm", ScriptedEncoder({}), metrics, cache_bytes=1 << 20)

    await engine.run([item([A]), item([A]), item([B])])

    def count(outcome: str) -> float | None:
        labels = {"stage": "vision_encode", "outcome": outcome}
        return metrics.registry.get_sample_value("fleet_feature_cache_total", labels)

    assert (count("hit"), count("miss")) == (1.0, 2.0)


async def test_tenants_do_not_share_the_cache(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    engine = await started(encoder)

    await engine.run([item([A], tenant="one")])
    (other,) = await engine.run([item([A], tenant="two")])

    assert hits(other) == [False]
    assert encoder.calls == [[A], [A]]


async def test_same_picture_twice_in_one_batch_is_one_pass(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    engine = await started(encoder)

    products = await engine.run([item([A, A], items=(0, 1)), item([A])])

    assert encoder.calls == [[A]]
    assert [hits(product) for product in products] == [[False, True], [True]]


async def test_calls_at_once_make_a_picture_once(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    encoder.gate.clear()
    engine = await started(encoder)

    async with asyncio.TaskGroup() as group:
        one = group.create_task(engine.run([item([A]), item([B])]))
        two = group.create_task(engine.run([item([C]), item([A])]))
        await asyncio.sleep(0)
        encoder.gate.set()

    assert sorted(name for call in encoder.calls for name in call) == [A, B, C]
    assert [hits(product) for product in (*one.result(), *two.result())] == [[False], [False], [False], [True]]


async def test_who_waited_for_a_failed_maker_makes_it_itself(item: MakeItem) -> None:
    encoder = RecordingEncoder(fail_once=A)
    encoder.gate.clear()
    engine = await started(encoder)

    one = asyncio.ensure_future(engine.run([item([A])]))
    await asyncio.sleep(0)
    two = asyncio.ensure_future(engine.run([item([A])]))
    await asyncio.sleep(0)
    encoder.gate.set()
    results = await asyncio.gather(one, two, return_exceptions=True)

    assert isinstance(results[0], EngineError)
    assert hits(results[1][0]) == [False]
    assert encoder.calls == [[A], [A]]


async def test_cancelled_maker_does_not_strand_who_waits(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    encoder.gate.clear()
    engine = await started(encoder)

    one = asyncio.ensure_future(engine.run([item([A])]))
    await asyncio.sleep(0)
    two = asyncio.ensure_future(engine.run([item([A])]))
    await asyncio.sleep(0)
    one.cancel()
    encoder.gate.set()
    (product,) = await two

    assert hits(product) == [False]
    with pytest.raises(asyncio.CancelledError):
        await one


async def test_cached_features_are_not_lost_when_another_batch_is_out_of_memory(item: MakeItem) -> None:
    engine = await started(RecordingEncoder(max_images=1))
    await engine.run([item([A])])

    with pytest.raises(EngineOutOfMemoryError):
        await engine.run([item([B]), item([C])])

    assert hits((await engine.run([item([A])]))[0]) == [True]


async def test_images_of_other_shapes_get_their_own_pass(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    engine = await started(encoder, limits=BatchLimits(2))
    square, wide = np.zeros((3, 8, 8), np.uint8), np.zeros((3, 8, 16), np.uint8)

    await engine.run([item([A], pixels=[square]), item([B], pixels=[wide]), item([C], pixels=[square])])

    assert encoder.calls == [[A, C], [B]]


async def test_unnamed_content_is_told_apart_by_its_pixels(item: MakeItem) -> None:
    encoder = RecordingEncoder()
    engine = await started(encoder)
    black, white = np.zeros((3, 8, 8), np.uint8), np.full((3, 8, 8), 255, np.uint8)

    products = await engine.run([item([""], pixels=[black]), item([""], pixels=[white]), item([""], pixels=[black])])

    assert [hits(product) for product in products] == [[False], [False], [True]]


async def test_step_without_its_pixels_fails_alone(item: MakeItem) -> None:
    engine = await started(RecordingEncoder())

    results = await engine.run([item([A], items=(3,)), item([B])])

    assert isinstance(results[0], ContractError)
    assert hits(results[1]) == [False]


async def test_prompt_and_encoder_must_agree_on_the_number_of_tokens(item: MakeItem) -> None:
    class ShortEncoder(ScriptedEncoder):
        def encode(self, images: Sequence[EncoderImage], num_padding: int = 0) -> list[np.ndarray]:
            return [features[:1] for features in super().encode(images, num_padding)]

    engine = await started(ShortEncoder({}))

    with pytest.raises(EngineError, match="1 tokens"):
        await engine.run([item([A])])


async def test_card_comes_from_the_encoder() -> None:
    class SmallEncoder(ScriptedEncoder):
        def load(self) -> EncoderFacts:
            return EncoderFacts(revision="r", num_tokens=9, hidden_size=5)

    (card,) = await VisionEngine("vlm", SmallEncoder({}), WorkerMetrics(), cache_bytes=0).start()

    assert (card.model, card.image_tokens, card.hidden_size, card.revision) == ("vlm", 9, 5, "r")


async def test_recordings_are_encoded_and_cached_like_pictures(item: MakeItem) -> None:
    engine = VisionEngine("m", ScriptedEncoder({"media": ["audio"]}), WorkerMetrics(), cache_bytes=1 << 20)
    (card,) = await engine.start()
    step = item([A], kind="audio", pixels=[np.zeros((128, 3000), np.float32)])

    (first,) = await engine.run([step])
    (again,) = await engine.run([step])

    assert card.input_modalities == (Modality.AUDIO,)
    assert isinstance(first, Product)
    assert isinstance(again, Product)
    assert (first.tensors["embeds0"].shape, first.hashes["embeds0"]) == ((16, 576), A)
    assert [product.media[0].cache_hit for product in (first, again)] == [False, True]
    assert first.media[0].kind == "audio"


@pytest.mark.parametrize("features", [np.zeros((128, 30), np.float64), np.zeros((1, 128, 30), np.float32)])
async def test_features_of_another_form_fail_their_step(item: MakeItem, features: np.ndarray) -> None:
    engine = VisionEngine("m", ScriptedEncoder({}), WorkerMetrics(), cache_bytes=0)
    await engine.start()

    (refused,) = await engine.run([item([A], kind="audio", pixels=[features])])

    assert isinstance(refused, ContractError)


def test_cache_forgets_the_longest_unused_first() -> None:
    features = {name: np.zeros((1, 8), np.float32) for name in "xyz"}
    keys = {name: FeatureKey("t", name) for name in "xyz"}
    cache = FeatureCache(64)

    cache.put(keys["x"], features["x"])
    cache.put(keys["y"], features["y"])
    cache.get(keys["x"])
    cache.put(keys["z"], features["z"])

    assert [cache.get(keys[name]) is not None for name in "xyz"] == [True, False, True]
    assert (cache.used_bytes, len(cache)) == (64, 2)


def test_cache_refuses_what_can_never_fit() -> None:
    cache = FeatureCache(31)

    cache.put(FeatureKey("t", "x"), np.zeros((1, 8), np.float32))

    assert (cache.used_bytes, len(cache)) == (0, 0)


def test_engine_is_chosen_by_the_settings() -> None:
    settings = {"pool": "vision-cpu", "model": "vlm"}

    assert isinstance(build_engine(VisionSettings(engine="scripted", **settings), WorkerMetrics()), VisionEngine)
    with pytest.raises(ValueError, match="unknown engine"):
        build_engine(VisionSettings(engine="other", **settings), WorkerMetrics())
