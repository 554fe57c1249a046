"""Pictures per second: eight side by side, one denoising step at a time, beside the same eight one after the other."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from fleet_common.telemetry.names import WorkerMetrics
from fleet_contracts.diffusion import DiffusionParams
from fleet_diffusion.core.limits import Caps
from fleet_diffusion.core.steps import StepPolicy
from fleet_diffusion.engine.port import PictureModel
from fleet_diffusion.testing import RecordingSink, picture_item
from fleet_diffusion.worker import DiffusionEngine
from loadtests.bench.figure import Figure

_NUM_PICTURES = 8
_STEPS = 5
_SIDE_PX = 64
#: Rounds of both ways in turn: the machine's other load hits both.
_ROUNDS = 2


def figures() -> list[Figure]:
    """One figure; a minute or two on two cores."""
    with tempfile.TemporaryDirectory() as folder:
        _make_pipeline(Path(folder))
        return asyncio.run(_measure(Path(folder)))


def _make_pipeline(folder: Path) -> None:
    """A Stable-Diffusion folder with random weights, as wide as the small models of this repository."""
    import torch
    from diffusers import AutoencoderTiny, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    words = folder / "words"
    words.mkdir()
    (words / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}')
    (words / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(words / "vocab.json"), str(words / "merges.txt"), model_max_length=16)
    text = CLIPTextConfig(
        vocab_size=3, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    StableDiffusionPipeline(
        vae=AutoencoderTiny(
            encoder_block_out_channels=(32, 32, 32, 32), decoder_block_out_channels=(32, 32, 32, 32), latent_channels=4
        ),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(64, 128),
            layers_per_block=2,
            norm_num_groups=16,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=128,
            attention_head_dim=32,
        ),
        scheduler=DDIMScheduler(prediction_type="v_prediction", clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


async def _measure(folder: Path) -> list[Figure]:
    from fleet_diffusion.engine.real import DiffusersModel

    model: PictureModel = DiffusersModel(str(folder), {}, num_threads=1, cache_bytes=1 << 20)
    caps = Caps(max_side=256, max_pixels=256 * 256, max_steps=100, max_pictures=8, max_prompt_chars=100)
    engine = DiffusionEngine(
        model, WorkerMetrics(), name="bench", caps=caps, policy=StepPolicy(_NUM_PICTURES, _NUM_PICTURES), lanes=16
    )
    await engine.start()
    try:
        await _draw(engine, 0)
        together: list[float] = []
        serial: list[float] = []
        for _ in range(_ROUNDS):
            started_s = time.monotonic()
            await asyncio.gather(*(_draw(engine, seed) for seed in range(_NUM_PICTURES)))
            together.append(_NUM_PICTURES / (time.monotonic() - started_s))
            started_s = time.monotonic()
            for seed in range(_NUM_PICTURES):
                await _draw(engine, seed)
            serial.append(_NUM_PICTURES / (time.monotonic() - started_s))
    finally:
        await engine.close()
    value, reference = statistics.median(together), statistics.median(serial)
    return [
        Figure(
            name="diffusion_batched_throughput",
            value=value,
            unit="pictures/s",
            reference=reference,
            ratio=value / reference,
            note=f"{_NUM_PICTURES} at once beside one after the other, {_STEPS} steps, {_SIDE_PX} px, guidance",
        )
    ]


async def _draw(engine: DiffusionEngine, seed: int) -> None:
    params = DiffusionParams(
        width=_SIDE_PX, height=_SIDE_PX, num_steps=_STEPS, guidance=3.0, seed=seed, prompt="a", n=1
    )
    await engine.run(picture_item(f"bench{seed}", params), RecordingSink())
