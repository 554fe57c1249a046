"""Packed passes of a vision tower beside padded ones, on the sizes of real pictures."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleet_vision.core.batches import BatchLimits, packed_batches
from fleet_vision.engine.port import EncoderImage
from loadtests.bench.figure import Figure

#: Tokens per picture: 24 quantiles of the 22,797 pictures in ServeGen's image trace (alibaba/ServeGen, 20 minutes).
#: A quarter of them is used: a laptop's core is slow at attention over 5,000 patches.
_SHARE = 4
_TOKENS = (4, 6, 6, 6, 25, 114, 161, 200, 252, 252, 252, 294)
_TOKENS_LARGE = (391, 432, 494, 638, 891, 1196, 1196, 1196, 1196, 1222, 1230, 1254)
_TOKEN_PX = 28
_BATCH = 8
_NUM_ROUNDS = 3
_TOWER = {"depth": 2, "embed_dim": 128, "num_heads": 2, "mlp_ratio": 4, "hidden_size": 192}


def figures() -> list[Figure]:
    """Measure; under a minute."""
    with tempfile.TemporaryDirectory() as folder:
        _write_tower(Path(folder))
        return _measure(Path(folder))


def _measure(folder: Path) -> list[Figure]:
    from fleet_vision.engine.real import CheckpointEncoder

    encoder = CheckpointEncoder(str(folder), {}, num_threads=1)
    unit = encoder.load().packing_unit
    images = _pictures()
    packs = packed_batches([image.num_patches for image in images], BatchLimits(_BATCH), unit)
    in_order = [images[start : start + _BATCH] for start in range(0, len(images), _BATCH)]
    padded = [[_blank_of_largest(batch)] * len(batch) for batch in in_order]
    computed = _count_patches(encoder)

    def run_packed() -> None:
        for pack in packs:
            encoder.encode([images[i] for i in pack.indices], pack.num_padding)

    def run_padded() -> None:
        for batch in padded:
            encoder.encode(batch)

    run_packed()
    needed = sum(image.num_patches for image in images)
    ratio = sum(computed) / needed
    packed_s, padded_s = _in_turns(run_packed, run_padded)
    padded_ratio = sum(image.num_patches for batch in padded for image in batch) / needed
    width = _TOWER["embed_dim"]
    note = f"{len(images)} pictures of a quarter of ServeGen's tokens, {_BATCH} a pass, a Qwen2-VL tower of {width}"
    return [
        Figure("packed_tokens_ratio", ratio, "", padded_ratio, ratio / padded_ratio, "computed / needed"),
        Figure("packed_vs_padded_speedup", padded_s / packed_s, "x", note=f"{note}; padded to the largest of a batch"),
        Figure("packed_pass", packed_s, "s", padded_s, packed_s / padded_s, "all pictures; beside padded"),
    ]


def _pictures() -> list[EncoderImage]:
    """In the order of arrival: shuffled, seeded."""
    tokens = [*_TOKENS, *_TOKENS_LARGE]
    random.Random(0).shuffle(tokens)
    noise = np.random.default_rng(0)
    made = []
    for number in tokens:
        rows = max(1, int((number / _SHARE) ** 0.5))
        columns = max(1, number // _SHARE // rows)
        shape = (3, rows * _TOKEN_PX, columns * _TOKEN_PX)
        made.append(EncoderImage(noise.integers(0, 256, shape, dtype=np.uint8), "", rows * columns, 4 * rows * columns))
    return made


def _blank_of_largest(batch: Sequence[EncoderImage]) -> EncoderImage:
    return max(batch, key=lambda image: image.num_patches)


def _count_patches(encoder: Any) -> list[int]:
    """Rows that reach the tower from now on, pass by pass: counted there, not where they were planned."""
    counted: list[int] = []
    patch_embed = encoder._tower._tower.patch_embed
    patch_embed.register_forward_hook(lambda module, inputs, output: counted.append(output.shape[0]))
    return counted


def _in_turns(one: Callable[[], None], other: Callable[[], None]) -> tuple[float, float]:
    """Median seconds of both, measured in turns."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(_NUM_ROUNDS):
        for run, seconds in zip((one, other), spent, strict=True):
            started_s = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(spent[0]), statistics.median(spent[1])


def _write_tower(folder: Path) -> None:
    """A Qwen2-VL folder with a random tower and nothing of a language model."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    torch.manual_seed(0)
    config = Qwen2VLConfig(vision_config=_TOWER)
    tower = Qwen2VisionTransformerPretrainedModel._from_config(config.vision_config)
    config.save_pretrained(folder)
    save_file({f"visual.{name}": tensor for name, tensor in tower.state_dict().items()}, folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
