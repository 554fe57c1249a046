"""The real preprocess and vision engines in the stage runner: from a client's body to the decode step's inputs."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import msgspec
import numpy as np
from PIL import Image

from fleet_common.stage.port import StepItem, TokenSink
from fleet_common.telemetry.names import WorkerMetrics
from fleet_common.testing.plans import chat_task
from fleet_common.testing.rig import Rig
from fleet_contracts.base import Stage
from fleet_contracts.control import ModelCard
from fleet_contracts.events import Failed, Usage
from fleet_contracts.preprocess import PreprocessResult
from fleet_contracts.vision import VisionResult
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.engine.scripted import ScriptedPromptEngine
from fleet_preprocess.worker import PreprocessEngine
from fleet_vision.engine.scripted import ScriptedEncoder
from fleet_vision.worker import VisionEngine


class InputsOfDecode:
    """A decode engine that only looks at what it is given."""

    slots = 4
    needs_root = False

    def __init__(self) -> None:
        self.items: list[StepItem] = []
        self.tensors: list[dict[tuple[str, str], np.ndarray]] = []

    async def start(self) -> tuple[ModelCard, ...]:
        return ()

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        self.items.append(item)
        self.tensors.append({key: np.array(array) for key, array in item.tensors.items()})
        await sink.tokens(0, [1], "x", finish_reason="stop")
        return Usage(prompt_tokens=1, completion_tokens=1)

    def running(self) -> int:
        return 0

    async def close(self) -> None: ...


def body_with(*colours: str) -> bytes:
    parts = [{"type": "text", "text": "colours?"}]
    for colour in colours:
        buffer = io.BytesIO()
        Image.new("RGB", (40, 30), colour).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


async def run_request(rig: Rig, body: bytes, num_images: int) -> object:
    """Submit a chat and wait for its end; returns the terminal event."""
    root = await rig.store.put(np.frombuffer(body, np.uint8), ttl_s=60)
    task = chat_task(now_unix_s=rig.clock.unix_s(), num_images=num_images, root=root)
    await rig.submit(task)
    async with asyncio.timeout(20):
        await rig.ingress.view(task.request_id).ended.wait()
    return rig.ingress.view(task.request_id).terminal[0]


async def start_fleet(rig: Rig) -> InputsOfDecode:
    await rig.start()
    preprocess = PreprocessEngine("m", ScriptedPromptEngine({}), MediaLimits())
    vision = VisionEngine("m", ScriptedEncoder({}), WorkerMetrics(), cache_bytes=1 << 20)
    decode = InputsOfDecode()
    await preprocess.start()
    await vision.start()
    for stage, engine in ((Stage.PREPROCESS, preprocess), (Stage.VISION_ENCODE, vision), (Stage.DECODE, decode)):
        await rig.worker(stage, engine, worker_id=stage.value)
    return decode


async def test_pictures_of_a_chat_reach_decode_as_embeddings() -> None:
    rig = Rig()
    decode = await start_fleet(rig)

    await run_request(rig, body_with("red", "blue"), 2)
    await run_request(rig, body_with("blue"), 1)
    await rig.stop()

    first, second = decode.items
    pre = first.task.inputs["pre"].result
    assert isinstance(pre, PreprocessResult)
    assert [item.source_width for item in pre.media] == [40, 40]
    assert decode.tensors[0]["enc0", "embeds0"].shape == (16, 576)
    assert not np.array_equal(decode.tensors[0]["enc0", "embeds0"], decode.tensors[0]["enc1", "embeds1"])
    assert np.array_equal(decode.tensors[0]["enc1", "embeds1"], decode.tensors[1]["enc0", "embeds0"])
    assert pre.num_prompt_tokens == decode.tensors[0]["pre", "prompt"].size - 2 + 32
    again = second.task.inputs["enc0"]
    assert isinstance(again.result, VisionResult)
    assert [item.cache_hit for item in again.result.media] == [True]
    assert again.tensors["embeds0"].content_hash == first.task.inputs["enc1"].tensors["embeds1"].content_hash
    assert msgspec.structs.replace(again.result.media[0], cache_hit=False, part="") == msgspec.structs.replace(
        pre.media[1], part=""
    )


async def test_damaged_picture_ends_the_request_naming_its_part() -> None:
    rig = Rig()
    await start_fleet(rig)
    body = body_with("red").replace(b"AAAA", b"AAAB")

    ended = await run_request(rig, body, 1)
    await rig.stop()

    assert isinstance(ended, Failed)
    assert ended.failure.code == "invalid_image"
    assert ended.failure.param == "messages[0].content[1].image_url"
    assert ended.failure.status == 400
