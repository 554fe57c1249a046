"""Preprocess, vision and decode engines of one model in a row, without a bus between them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from fleet_common.errors import FleetError
from fleet_common.stage.port import Product, StepItem
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.testing.plans import chat_plan, chat_task
from fleet_contracts.base import Stage, WorkerId
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import Attempt, Usage
from fleet_contracts.preprocess import PreprocessParams, PreprocessResult
from fleet_contracts.tensors import InlinePlace, TensorRef
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams
from fleet_contracts.work import StepOutput
from fleet_decode.testing import RecordingSink
from fleet_preprocess.app import build_engine as build_preprocess
from fleet_preprocess.settings import PreprocessSettings
from fleet_preprocess.worker import PreprocessEngine
from fleet_vision.app import build_engine as build_vision
from fleet_vision.settings import VisionSettings
from fleet_vision.worker import VisionEngine
from tests.support.audio_files import Samples, wav

ChatPart = str | Image.Image | Samples | Mapping[str, Any]


@dataclass(frozen=True)
class Encoded:
    """A chat with the embeddings of its media, ready for decode."""

    pre: Product
    outputs: Mapping[str, StepOutput]
    tensors: Mapping[tuple[str, str], Any]

    @property
    def result(self) -> PreprocessResult:
        assert isinstance(self.pre.result, PreprocessResult)
        return self.pre.result

    @property
    def prompt(self) -> list[int]:
        return [int(token_id) for token_id in self.pre.tensors["prompt"]]


class Pipeline:
    """The engines as their services build them from settings."""

    def __init__(self, folder: Path, decode: Any = None, **preprocess: Any) -> None:
        named = {"pool": "p", "model": "m", "model_path": str(folder), "engine": "real"}
        self.metrics = WorkerMetrics()
        self.preprocess: PreprocessEngine = build_preprocess(PreprocessSettings(**named, **preprocess))
        self.vision: VisionEngine = build_vision(VisionSettings(**named), self.metrics)
        self.decode = decode

    async def start(self) -> None:
        for engine in (self.preprocess, self.vision, self.decode):
            if engine is not None:
                await engine.start()

    async def close(self) -> None:
        for engine in (self.preprocess, self.vision, self.decode):
            if engine is not None:
                await engine.close()

    async def prepare(self, body: Mapping[str, Any], params: PreprocessParams = PreprocessParams()) -> Product:  # noqa: B008
        """What preprocess makes of a chat. Raises what it refuses."""
        (product,) = await self.preprocess.run([_item(0, 0, root=json.dumps(body).encode(), params=params)])
        if isinstance(product, FleetError):
            raise product
        return product

    async def encode(self, body: Mapping[str, Any]) -> Encoded:
        """Preprocess a chat and encode all its media in one call."""
        pre = await self.prepare(body)
        outputs = {"pre": _output("pre", pre)}
        tensors = {("pre", name): array for name, array in pre.tensors.items()}
        kinds = {"image": VisionParams, "video": VideoEncodeParams, "audio": AudioEncodeParams}
        media = pre.result.media if isinstance(pre.result, PreprocessResult) else ()
        steps = [
            _item(len(media), 1 + i, outputs, tensors, params=kinds[medium.kind](items=(i,)))
            for i, medium in enumerate(media)
        ]
        for i, product in enumerate(await self.vision.run(steps)):
            if isinstance(product, FleetError):
                raise product
            outputs[f"enc{i}"] = _output(f"enc{i}", product)
            tensors |= {(f"enc{i}", name): array for name, array in product.tensors.items()}
        return Encoded(pre, outputs, tensors)

    async def answer(self, encoded: Encoded, params: DecodeParams) -> tuple[list[int], Usage]:
        """Token ids of the answer, and what was used."""
        sink = RecordingSink()
        num_images = len(encoded.outputs) - 1
        item = _item(num_images, 1 + num_images, encoded.outputs, encoded.tensors, params=params)
        usage = await self.decode.run(item, sink)
        return sink.ids(), usage


def chat_of(parts: Sequence[ChatPart]) -> dict[str, Any]:
    """A chat of one turn: texts, pictures, recordings of 16 kHz, and ready-made parts in order."""
    return {"model": "m", "messages": [{"role": "user", "content": [_part(part) for part in parts]}]}


def png_url(image: Image.Image) -> str:
    """A `data:` URL of a picture, pixel by pixel."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def input_audio(data: bytes, kind: str = "wav") -> dict[str, Any]:
    """The part of a file of audio."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def video_url(data: bytes) -> dict[str, Any]:
    """The part of a video file."""
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}


def _part(part: ChatPart) -> Mapping[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        return {"type": "image_url", "image_url": {"url": png_url(part)}}
    if isinstance(part, np.ndarray):
        return input_audio(wav(part))
    return part


def _item(
    num_images: int,
    step: int,
    outputs: Mapping[str, StepOutput] | None = None,
    tensors: Mapping[tuple[str, str], Any] | None = None,
    *,
    root: bytes = b"",
    params: Any = None,
) -> StepItem:
    """Step number `step` of a chat's plan, with `params` in place of its own."""
    plan = chat_plan(num_images)
    if params is not None:
        steps = list(plan.steps)
        steps[step] = msgspec.structs.replace(steps[step], params=params)
        plan = msgspec.structs.replace(plan, steps=tuple(steps))
    task = chat_task(now_unix_s=0.0, plan=plan)
    task = msgspec.structs.replace(task, step_id=plan.steps[step].step_id, inputs=dict(outputs or {}))
    attempt = Attempt(
        request_id=task.request_id,
        step_id=task.step_id,
        stage=Stage(plan.steps[step].stage),
        worker_id=WorkerId("w"),
        epoch=0,
        delivery=1,
    )
    return StepItem(task=task, attempt=attempt, tensors=tensors or {}, root=root)


def _output(step_id: str, product: Product) -> StepOutput:
    refs = {
        name: TensorRef(
            place=InlinePlace(data=b""),
            dtype=product.dtypes.get(name, str(array.dtype)),
            shape=array.shape,
            nbytes=array.nbytes,
            content_hash=product.hashes.get(name, ""),
        )
        for name, array in product.tensors.items()
    }
    return StepOutput(step_id=step_id, epoch=0, tensors=refs, result=product.result)
