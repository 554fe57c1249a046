"""Run as a decode worker's process is: one family's media through our embeddings and through vLLM's own tower.

`python -m tests.support.family_answers FAMILY FOLDER` with `decode_environment` prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fleet_contracts.decode import DecodeParams
from fleet_decode.engine.families import FAMILIES
from fleet_decode.engine.vllm import VllmEngine
from fleet_decode.worker import DecodeEngine
from tests.support.audio_files import Samples
from tests.support.pipeline import ChatPart, Pipeline, chat_of
from tests.support.tiny_models import HEARING, WRITERS

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


def chats(family: str) -> list[list[ChatPart]]:
    """20 pictures (or clips) of different sizes alone, and three together in two orders."""
    pictures: list[Image.Image | Samples] = [
        random_clip(seed) if family in HEARING else random_picture(seed) for seed in range(20)
    ]
    together = pictures[:3]
    return [
        *([picture, "What is it?"] for picture in pictures),
        [together[0], "and", together[1], together[2], "?"],
        [together[2], "and", together[1], together[0], "?"],
    ]


async def through_vllm(
    folder: Path, family: str, prompts: Sequence[list[int]], media: Sequence[list[Image.Image | Samples]]
) -> list[tuple[list[int], int]]:
    """Answer and length of the prompt, as vLLM makes them with its own tower."""
    from vllm.sampling_params import SamplingParams

    own_kind = FAMILIES[family].media[0]
    limits = {kind: 3 if kind == own_kind else 0 for kind in FAMILIES[family].media}
    own = {"max_model_len": CONTEXT_TOKENS, "enable_mm_embeds": False, "limit_mm_per_prompt": limits}
    engine = VllmEngine(str(folder), slots=4, engine_args=own)
    await engine.start()
    answers = []
    try:
        for number, (prompt, items) in enumerate(zip(prompts, media, strict=True)):
            given: Any = {"prompt_token_ids": prompt, "multi_modal_data": {own_kind: items}}
            sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
            last: Any = None
            async for output in engine._started().llm.generate(given, sampling, str(number)):
                last = output
            answers.append((list(last.outputs[0].token_ids), len(last.prompt_token_ids)))
    finally:
        await engine.close()
    return answers


async def through_embeddings(folder: Path, family: str) -> tuple[list[tuple[list[int], int]], list[list[int]], str]:
    """Answers and lengths of prompts, prompts as preprocess made them, and the modules vLLM loaded."""
    vllm = VllmEngine(str(folder), slots=4, engine_args={"max_model_len": CONTEXT_TOKENS})
    pipeline = Pipeline(folder, DecodeEngine(vllm, model="m", slots=4))
    await pipeline.start()
    try:
        encoded = [await pipeline.encode(chat_of(parts)) for parts in chats(family)]
        answered = [await pipeline.answer(one, GREEDY) for one in encoded]
        (modules,) = await vllm._started().llm.collective_rpc("get_model_inspection")
    finally:
        await pipeline.close()
    return [(ids, usage.prompt_tokens) for ids, usage in answered], [one.prompt for one in encoded], modules


async def main(family: str, folder: Path) -> None:
    """Print what both paths answered."""
    WRITERS[family](folder)
    ours, prompts, modules = await through_embeddings(folder, family)
    media = [[part for part in parts if isinstance(part, Image.Image | np.ndarray)] for parts in chats(family)]
    theirs = await through_vllm(folder, family, prompts, media)
    print(json.dumps({"embeddings": ours, "vllm": theirs, "modules": modules}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
