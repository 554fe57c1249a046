"""Train the image model: autoencoder, text encoder, then the UNet (`make train-diffusion`).

Stopped at any time, the same command goes on from the last checkpoint in the state folder. The log names, as it goes,
how many of 40 prompts came out right by geometry and colour; `contact-sheet.png` in the state folder shows them.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_models.image_judge import Verdict, judge
from fleet_models.image_model import (
    Parts,
    as_pipeline,
    build_scheduler,
    build_unet,
    save_part,
    tokenize,
)
from fleet_models.image_prompts import compose, plain_prompt
from fleet_models.image_scenes import IMAGE_SIDE_PX, render_scenes
from fleet_models.one_shape import OneShape, random_one_shape
from fleet_models.train_image_parts import encode_all, save_first_parts, train_autoencoder, train_text_encoder
from fleet_models.training import autocast, say
from fleet_models.training_stages import Stage, generator_for, run_stage

GUIDANCE = 3.0
NUM_INFERENCE_STEPS = 20
NUM_JUDGED = 40
SHEET_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to train."""

    seed: int
    num_scenes: int
    autoencoder_steps: int
    text_steps: int
    unet_steps: int
    batch_size: int
    num_threads: int


def main() -> None:
    """Train and save from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--state", type=Path, default=Path("build/diffusion"), help="checkpoints and contact sheets")
    parser.add_argument("--scenes", type=int, default=20_000)
    parser.add_argument("--autoencoder-steps", type=int, default=1_500)
    parser.add_argument("--text-steps", type=int, default=300)
    parser.add_argument("--unet-steps", type=int, default=5_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="two on a busy machine are slower than one")
    args = parser.parse_args()
    settings = Settings(
        seed=args.seed,
        num_scenes=args.scenes,
        autoencoder_steps=args.autoencoder_steps,
        text_steps=args.text_steps,
        unet_steps=args.unet_steps,
        batch_size=args.batch_size,
        num_threads=args.threads,
    )
    train(settings, args.state, args.out)


def train(settings: Settings, state: Path, out: Path) -> None:
    """Run the three stages, or what is left of them, and write weights and training.json to `out`."""
    import torch

    started_s = time.monotonic()
    torch.set_num_threads(settings.num_threads)
    scenes, pixels = render_scenes(settings.num_scenes, settings.seed, settings.num_threads)
    say(f"rendered {len(scenes)} scenes in {time.monotonic() - started_s:.0f} s")
    vae = train_autoencoder(pixels, settings.seed, settings.autoencoder_steps, state)
    tokenizer, text_encoder = train_text_encoder(settings.seed, settings.text_steps, state)
    save_first_parts(vae, tokenizer, text_encoder, out)
    latents = _cached_latents(vae, pixels, state) * vae.config.scaling_factor
    del pixels
    parts = Parts(vae, tokenizer, text_encoder, _fresh_unet(settings.seed))
    _train_unet(settings, parts, (scenes, latents), state, out)
    save_part(parts.unet, out / "unet.safetensors")
    wanted, verdicts, _ = draw_and_judge(parts, 100, seed=settings.seed + 1)
    report = {
        "seed": settings.seed,
        "num_scenes": settings.num_scenes,
        "unet_steps": settings.unet_steps,
        "batch_size": settings.batch_size,
        "right_of_100": sum(v.agrees_with(w) for v, w in zip(verdicts, wanted, strict=True)),
        "last_run_time_s": round(time.monotonic() - started_s),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    say(json.dumps(report))


def _cached_latents(vae: Any, pixels: Any, state: Path) -> Any:
    """Latents of all pictures; kept beside the checkpoints while pictures and autoencoder are the same."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    digest = hashlib.sha256(pixels.tobytes())
    for name, value in vae.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    path, key = state / "latents.safetensors", digest.hexdigest()
    if path.is_file():
        with safe_open(path, "pt") as cached:
            if cached.metadata().get("made_of") == key:
                return cached.get_tensor("latents")
    latents = encode_all(vae, pixels)
    save_file({"latents": latents.contiguous()}, path, metadata={"made_of": key})
    return latents


def _fresh_unet(seed: int) -> Any:
    """A UNet whose attention is plain matrix products: on a CPU their backward pass is several times faster."""
    import torch
    from diffusers.models.attention_processor import AttnProcessor

    torch.manual_seed(seed)
    unet = build_unet().to(memory_format=torch.channels_last)
    unet.set_attn_processor(AttnProcessor())
    return unet


def _train_unet(settings: Settings, parts: Parts, data: tuple[Sequence[OneShape], Any], state: Path, out: Path) -> None:
    import torch

    scenes, latents = data
    scheduler = build_scheduler()
    num_levels = scheduler.config.num_train_timesteps

    def loss(step: int) -> Any:
        """Squared error of the predicted velocity, at noise levels spread evenly over the batch."""
        generator = generator_for(settings.seed, "unet", step)
        rng = random.Random(f"unet/{settings.seed}/{step}")
        chosen = torch.randint(len(scenes), (settings.batch_size,), generator=generator)
        prompts = [compose(scenes[i], rng)[0] if rng.random() > 0.08 else "" for i in chosen.tolist()]
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        offsets = torch.rand(settings.batch_size, generator=generator) + torch.arange(settings.batch_size)
        levels = (offsets / settings.batch_size * num_levels).long().clamp(max=num_levels - 1)
        noisy = scheduler.add_noise(clean, noise, levels).contiguous(memory_format=torch.channels_last)
        target = scheduler.get_velocity(clean, noise, levels)
        with autocast():
            states = parts.text_encoder(tokenize(parts.tokenizer, prompts)).last_hidden_state
            predicted = parts.unet(noisy, levels, states).sample
        return (predicted.float() - target).square().mean()

    def report(step: int) -> str:
        save_part(parts.unet, out / "unet.safetensors")
        wanted, verdicts, pictures = draw_and_judge(parts, NUM_JUDGED, seed=settings.seed)
        contact_sheet(pictures).save(state / "contact-sheet.png")
        contact_sheet(pictures).save(state / f"contact-sheet-{step:06}.png")
        return summary(wanted, verdicts)

    run_stage(Stage("unet", parts.unet, settings.unet_steps, 1e-3, loss, report, 250), state)


def draw_and_judge(parts: Parts, num: int, seed: int) -> tuple[list[OneShape], list[Verdict], list[Any]]:
    """Draw `num` scenes from plain prompts, a seed each; returns what was asked for, what came out, the pictures."""
    import numpy as np

    rng = random.Random(f"judged/{seed}")
    wanted = [random_one_shape(rng) for _ in range(num)]
    with autocast():
        pictures = draw(as_pipeline(parts), [plain_prompt(scene) for scene in wanted], seed)
    return wanted, [judge(np.asarray(picture)) for picture in pictures], pictures


def draw(pipeline: Any, prompts: Sequence[str], seed: int, *, batch_size: int = 20) -> list[Any]:
    """Pictures of prompts; the i-th has the seed `seed + i`, whatever the batch size."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    pictures: list[Any] = []
    for start in range(0, len(prompts), batch_size):
        part = list(prompts[start : start + batch_size])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        pictures += pipeline(
            part, num_inference_steps=NUM_INFERENCE_STEPS, guidance_scale=GUIDANCE, generator=generators
        ).images
    return pictures


def summary(wanted: Sequence[OneShape], verdicts: Sequence[Verdict]) -> str:
    """How many came out right, in all and by part."""
    pairs = list(zip(wanted, verdicts, strict=True))
    whole = sum(v.agrees_with(w) for w, v in pairs)
    shapes = sum(v.seen.shape == w.shape for w, v in pairs)
    colours = sum(v.seen.colour == w.colour for w, v in pairs)
    backgrounds = sum(v.seen.background == w.background for w, v in pairs)
    overlap = sum(v.overlap for v in verdicts) / len(verdicts)
    return (
        f"right {whole}/{len(pairs)} (shape {shapes}, colour {colours}, background {backgrounds}),"
        f" mean overlap {overlap:.2f}"
    )


def contact_sheet(pictures: Sequence[Any]) -> Any:
    """All pictures in rows of SHEET_COLUMNS."""
    from PIL import Image

    cell = IMAGE_SIDE_PX + 2
    rows = -(-len(pictures) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (SHEET_COLUMNS * cell, rows * cell), (127, 127, 127))
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % SHEET_COLUMNS * cell + 1, i // SHEET_COLUMNS * cell + 1))
    return sheet


if __name__ == "__main__":
    main()
