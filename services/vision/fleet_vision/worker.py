"""The stage's engine: pixels in, embeddings out, each picture encoded once."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from fleet_common.errors import ContractError, EngineDeadError, EngineError, FleetError
from fleet_common.stage.port import Product, StepItem
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.tensors.port import Array
from fleet_contracts.base import Modality, Stage
from fleet_contracts.control import ModelCard
from fleet_contracts.preprocess import MediaItem, PreprocessResult
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams, VisionResult
from fleet_contracts.work import StepOutput
from fleet_vision.core.batches import Batch, BatchLimits, batches_by_shape, packed_batches
from fleet_vision.core.cache import FeatureCache, FeatureKey, Features
from fleet_vision.core.numbers import bfloat16_bits
from fleet_vision.engine.port import EncoderImage, VisionEncoder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WantedImage:
    """One image of one step.

    Attributes:
        index: which of the request's images it is.
    """

    index: int
    key: FeatureKey
    image: EncoderImage
    media: MediaItem


@dataclass(frozen=True, slots=True)
class Found:
    """Features of a key; `was_cached` is False only for whoever made them."""

    features: Features
    was_cached: bool


class VisionEngine:
    """Feature cache with single flight before an encoder. Implements `BatchEngine`."""

    needs_root = False

    def __init__(
        self,
        model: str,
        encoder: VisionEncoder,
        metrics: WorkerMetrics,
        *,
        cache_bytes: int,
        limits: BatchLimits = BatchLimits(8),  # noqa: B008 (frozen)
        dtype: str = "float32",
    ) -> None:
        """
        Args:
            model: name under which clients ask for the model.
            limits: bounds of one pass through the tower.
            dtype: `float32`, or `bfloat16` (kept as uint16 bits).
        """
        self.max_batch = limits.max_images
        self._limits = limits
        self._packing_unit = 0
        self._model = model
        self._encoder = encoder
        self._lookups = metrics.feature_cache_total
        self._patches = metrics.vision_patches_total
        self._dtype = dtype
        self._cache = FeatureCache(cache_bytes)
        self._flights: dict[FeatureKey, asyncio.Future[Features | None]] = {}
        # One thread: torch brings its own, and a model runs one pass at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vision")

    async def start(self) -> tuple[ModelCard, ...]:
        try:
            facts = await self._in_thread(self._encoder.load)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EngineDeadError(f"the model could not be loaded: {error}") from error
        self._packing_unit = facts.packing_unit
        return (
            ModelCard(
                model=self._model,
                input_modalities=facts.media,
                output_modalities=(Modality.EMBEDDING,),
                image_tokens=facts.num_tokens,
                hidden_size=facts.hidden_size,
                revision=facts.revision,
            ),
        )

    async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
        """One result per step. Raises what the encoder raises: the runner splits the batch."""
        read = [_wanted_or_error(item) for item in items]
        wanted = [image for images in read if not isinstance(images, FleetError) for image in images]
        found = await self._find(wanted)
        made_here = {key for key, one in found.items() if not one.was_cached}
        return [
            images if isinstance(images, FleetError) else self._product(images, found, made_here) for images in read
        ]

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _find(self, wanted: Sequence[WantedImage]) -> Mapping[FeatureKey, Found]:
        """Features of every key: from the cache, from another call that is making them, or made now."""
        missing = {image.key: image.image for image in wanted}
        found: dict[FeatureKey, Found] = {}
        while missing:
            for key in list(missing):
                cached = self._cache.get(key)
                if cached is not None:
                    found[key] = Found(cached, was_cached=True)
                    del missing[key]
            mine = {key: image for key, image in missing.items() if key not in self._flights}
            others = {key: self._flights[key] for key in missing if key in self._flights}
            # Mine first: two calls that wait for each other's images can then not block each other.
            for key, features in (await self._make(mine)).items():
                found[key] = Found(features, was_cached=False)
                del missing[key]
            for key, flight in others.items():
                others_features = await asyncio.shield(flight)
                if others_features is not None:  # else its maker failed: the next round makes it here
                    found[key] = Found(others_features, was_cached=True)
                    del missing[key]
        return found

    async def _make(self, images: Mapping[FeatureKey, EncoderImage]) -> Mapping[FeatureKey, Features]:
        flights = {key: asyncio.get_running_loop().create_future() for key in images}
        self._flights.update(flights)
        made: dict[FeatureKey, Features] = {}
        try:
            keys = list(images)
            for batch in self._batches([images[key] for key in keys]):
                batch_keys = [keys[i] for i in batch.indices]
                encoded = await self._encode([images[key] for key in batch_keys], batch)
                for key, features in zip(batch_keys, encoded, strict=True):
                    made[key] = features
                    self._cache.put(key, features)
        finally:
            for key, flight in flights.items():
                del self._flights[key]
                flight.set_result(made.get(key))
        return made

    def _batches(self, images: Sequence[EncoderImage]) -> list[Batch]:
        num_patches = [image.num_patches or image.num_tokens for image in images]
        if self._packing_unit:
            return packed_batches(num_patches, self._limits, self._packing_unit)
        return batches_by_shape([image.pixels.shape for image in images], num_patches, self._limits)

    async def _encode(self, images: Sequence[EncoderImage], batch: Batch) -> list[Features]:
        encoded = await self._in_thread(lambda: self._encoder.encode(images, batch.num_padding))
        self._patches.labels(kind="needed").inc(batch.num_needed)
        self._patches.labels(kind="computed").inc(batch.num_computed)
        for image, features in zip(images, encoded, strict=True):
            if features.shape[0] != image.num_tokens:
                raise EngineError(f"the encoder gives {features.shape[0]} tokens, the prompt has {image.num_tokens}")
        kept: list[Features] = [bfloat16_bits(one) if self._dtype == "bfloat16" else one for one in encoded]
        for one_kept in kept:
            one_kept.flags.writeable = False  # shared by the cache and every request that hits it
        return kept

    def _product(
        self, images: Sequence[WantedImage], found: Mapping[FeatureKey, Found], made_here: set[FeatureKey]
    ) -> Product:
        media = []
        for image in images:
            # Of several uses of a fresh picture in one batch the first has paid for it.
            is_first_use = image.key in made_here
            made_here.discard(image.key)
            outcome = "miss" if is_first_use else "hit"
            self._lookups.labels(stage=Stage.VISION_ENCODE.value, outcome=outcome).inc()
            media.append(msgspec.structs.replace(image.media, cache_hit=not is_first_use))
        names = [f"embeds{image.index}" for image in images]
        tensors: dict[str, Array] = {name: found[image.key].features for name, image in zip(names, images, strict=True)}
        return Product(
            tensors=tensors,
            result=VisionResult(media=tuple(media)),
            media=tuple(media),
            dtypes=dict.fromkeys(names, "bfloat16") if self._dtype == "bfloat16" else {},
            hashes={name: image.key.content_hash for name, image in zip(names, images, strict=True)},
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _wanted_or_error(item: StepItem) -> list[WantedImage] | FleetError:
    try:
        return _wanted_images(item)
    except FleetError as error:
        return error


def _wanted_images(item: StepItem) -> list[WantedImage]:
    """The images, or recordings, a step names. ContractError when its input does not hold them."""
    params = item.task.step.params
    if not isinstance(params, VisionParams | VideoEncodeParams | AudioEncodeParams):
        raise ContractError(f"vision cannot run {type(params).__name__}")
    for output in item.task.inputs.values():
        if isinstance(output.result, PreprocessResult):
            return [_wanted_image(item, output, output.result, index) for index in params.items]
    raise ContractError("the step has no output of preprocess among its inputs")


def _wanted_image(item: StepItem, output: StepOutput, result: PreprocessResult, index: int) -> WantedImage:
    is_audio = isinstance(item.task.step.params, AudioEncodeParams)
    name = f"audio{index}" if is_audio else f"pixels{index}"
    pixels = item.tensors.get((output.step_id, name))
    if pixels is None or not 0 <= index < len(result.media):
        raise ContractError(f"preprocess made no {name}")
    if is_audio:
        _check_features(name, pixels)
    else:
        _check_pixels(name, pixels)
    media = result.media[index]
    content_hash = output.tensors[name].content_hash or _hash_pixels(pixels)
    key = FeatureKey(tenant=item.task.tenant, content_hash=content_hash)
    num_patches = math.prod(media.grid) if media.grid else 0
    return WantedImage(index, key, EncoderImage(pixels, content_hash, media.num_tokens, num_patches), media)


def _check_pixels(name: str, pixels: Array) -> None:
    if pixels.ndim not in (3, 4) or pixels.shape[-3] != 3 or pixels.dtype not in (np.uint8, np.float32):
        raise ContractError(f"{name} is {pixels.dtype} {pixels.shape}, not uint8 or float32 [..., 3, height, width]")


def _check_features(name: str, features: Array) -> None:
    if features.ndim != 2 or features.dtype != np.float32:
        raise ContractError(f"{name} is {features.dtype} {features.shape}, not float32 [mel bins, frames]")


def _hash_pixels(pixels: Array) -> str:
    return hashlib.sha256(f"{pixels.dtype}{pixels.shape}".encode() + pixels.tobytes()).hexdigest()
