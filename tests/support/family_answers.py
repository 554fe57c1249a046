"""Run as a decode worker's process is: one family's media through our embeddings and through vLLM's own tower.

Videos are compared where vLLM's own path puts nothing between the frames.

`python -m tests.support.family_answers FAMILY FOLDER` with `decode_environment` prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fleet_contracts.decode import DecodeParams
from fleet_decode.engine.families import FAMILIES, VIDEO_AS_IT_IS
from fleet_decode.engine.vllm import VllmEngine
from fleet_decode.worker import DecodeEngine
from tests.support.audio_files import Samples
from tests.support.pipeline import ChatPart, Encoded, Pipeline, chat_of, video_url
from tests.support.tiny_models import HEARING, WRITERS
from tests.support.video_files import video_file

#: Families whose videos are compared.
WATCHING = ("qwen2_vl", "qwen2_5_vl")
GREEDY = DecodeParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CONTEXT_TOKENS = 2048


def random_picture(seed: int) -> Image.Image:
    """Coloured blocks, 20 to 400 pixels a side."""
    random = np.random.default_rng(seed)
    width, height = (int(side) for side in random.integers(20, 400, 2))
    columns, rows = (int(count) for count in random.integers(1, 7, 2))
    blocks = random.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def random_clip(seed: int) -> Samples:
    """Notes and noise of 0.1 to 12 seconds; as a file of 16 bits holds them."""
    random = np.random.default_rng(seed)
    num_samples = int(random.integers(1_600, 12 * 16_000))
    seconds = np.arange(num_samples) / 16_000
    notes = [
        amplitude * np.sin(2 * np.pi * hertz * seconds)
        for hertz, amplitude in zip(random.uniform(80, 6_000, 4), random.uniform(0, 0.2, 4), strict=True)
    ]
    noise = random.uniform(0, 0.15) * random.uniform(-1, 1, num_samples)
    whole = np.round((np.sum(notes, axis=0) + noise) * 32767) / 32768
    return whole.astype(np.float32)


def random_video(seed: int) -> dict[str, Any]:
    """Three pictures of blocks, half a second each, to the last bit."""
    sizes = np.random.default_rng(seed).integers(40, 200, 2)
    size = (int(sizes[0]), int(sizes[1]))
    frames = [np.asarray(random_picture(10 * seed + number).resize(size)) for number in range(3)]
    return video_url(video_file(frames, 2, "avi", "rawvideo", "bgr24"))


def chats(family: str) -> list[list[ChatPart]]:
    """20 pictures (or clips) of different sizes alone, videos, and three media together in two orders."""
    pictures: list[Image.Image | Samples] = [
        random_clip(seed) if family in HEARING else random_picture(seed) for seed in range(20)
    ]
    together = pictures[:3]
    return [
        *([picture, "What is it?"] for picture in pictures),
        *([random_video(seed), "What is it?"] for seed in range(5) if family in WATCHING),
        [together[0], "and", together[1], together[2], "?"],
        [together[2], "and", together[1], together[0], "?"],
    ]


@dataclass(frozen=True)
class OwnPrompt:
    """A prompt as vLLM takes it when its own tower looks at the media."""

    ids: list[int]
    kind: str
    items: list[Any]


def own_prompt(folder: Path, family: str, parts: Sequence[ChatPart], encoded: Encoded) -> OwnPrompt:
    """The same chat for vLLM; videos as the frames that preprocess kept."""
    if not isinstance(parts[0], Mapping):
        items = [part for part in parts if isinstance(part, Image.Image | np.ndarray)]
        return OwnPrompt(encoded.prompt, FAMILIES[family].media[0], items)
    config = json.loads((folder / "config.json").read_text())
    ids = [config["video_token_id"] if one == config["image_token_id"] else one for one in encoded.prompt]
    frames = encoded.pre.tensors["pixels0"].transpose(0, 2, 3, 1)
    times = {"fps": 2.0, "duration": len(frames) / 2, "total_num_frames": len(frames)}
    kept = {"frames_indices": list(range(len(frames))), "video_backend": "opencv", "do_sample_frames": False}
    return OwnPrompt(ids, "video", [(frames, times | kept)])


async def through_vllm(folder: Path, family: str, prompts: Sequence[OwnPrompt]) -> list[tuple[list[int], int]]:
    """Answer and length of each prompt, as vLLM makes them with its own tower."""
    kinds = {prompt.kind for prompt in prompts}
    limits = {kind: 3 if kind in kinds else 0 for kind in FAMILIES[family].media}
    own = {"max_model_len": CONTEXT_TOKENS, "enable_mm_embeds": False, "limit_mm_per_prompt": limits}
    engine = VllmEngine(str(folder), slots=4, engine_args=own)
    await engine.start()
    try:
        return [await own_answer(engine, family, prompt, str(number)) for number, prompt in enumerate(prompts)]
    finally:
        await engine.close()


async def own_answer(engine: VllmEngine, family: str, prompt: OwnPrompt, name: str) -> tuple[list[int], int]:
    """Of one prompt, greedily."""
    from vllm.sampling_params import SamplingParams

    given: Any = {"prompt_token_ids": prompt.ids, "multi_modal_data": {prompt.kind: prompt.items}}
    if prompt.kind == "video":
        # Frames have their size, and vLLM normalises on its device.
        given["mm_processor_kwargs"] = {**FAMILIES[family].processor_kwargs, **VIDEO_AS_IT_IS}
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    last: Any = None
    async for output in engine._started().llm.generate(given, sampling, name):
        last = output
    return list(last.outputs[0].token_ids), len(last.prompt_token_ids)


async def through_embeddings(folder: Path, family: str) -> tuple[list[tuple[list[int], int]], list[Encoded], str]:
    """Answers and lengths of prompts, the chats as preprocess and vision made them, and the modules vLLM loaded."""
    vllm = VllmEngine(str(folder), slots=4, engine_args={"max_model_len": CONTEXT_TOKENS})
    pipeline = Pipeline(folder, DecodeEngine(vllm, model="m", slots=4))
    await pipeline.start()
    try:
        encoded = [await pipeline.encode(chat_of(parts)) for parts in chats(family)]
        answered = [await pipeline.answer(one, GREEDY) for one in encoded]
        (modules,) = await vllm._started().llm.collective_rpc("get_model_inspection")
    finally:
        await pipeline.close()
    return [(ids, usage.prompt_tokens) for ids, usage in answered], encoded, modules


async def main(family: str, folder: Path) -> None:
    """Print what both paths answered."""
    WRITERS[family](folder)
    ours, encoded, modules = await through_embeddings(folder, family)
    prompts = [own_prompt(folder, family, *pair) for pair in zip(chats(family), encoded, strict=True)]
    theirs = await through_vllm(folder, family, prompts)
    print(json.dumps({"embeddings": ours, "vllm": theirs, "modules": modules}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
