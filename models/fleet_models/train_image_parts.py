"""The first two stages of the image model: its autoencoder and its text encoder."""

import random
from pathlib import Path
from typing import Any

from fleet_models.colours import COLOURS
from fleet_models.image_model import build_text_encoder, build_tokenizer, build_vae, save_part, tokenize
from fleet_models.image_prompts import compose, fact_classes
from fleet_models.one_shape import random_one_shape
from fleet_models.scenes import SHAPES
from fleet_models.training import autocast, say
from fleet_models.training_stages import Stage, generator_for, run_stage

CROP_PX = 32
LATENT_NOISE = 0.1
NUM_TOKENIZER_PROMPTS = 20_000


def train_autoencoder(pixels: Any, seed: int, num_steps: int, folder: Path) -> Any:
    """Learn to compress pictures; returns the autoencoder with its scaling factor set.

    Args:
        pixels: uint8 [num, side, side, 3].
    """
    import torch

    torch.manual_seed(seed)
    vae = build_vae().to(memory_format=torch.channels_last)
    whole_from = num_steps * 4 // 5

    def loss(step: int) -> Any:
        """Crops first (four times as many pictures a second), whole pictures at the end, where borders count."""
        generator = generator_for(seed, "autoencoder", step)
        batch = _crops(pixels, 48, generator) if step < whole_from else _whole(pixels, 16, generator)
        with autocast():
            latents = vae.encode(batch).latents.float()
            noisy = latents + LATENT_NOISE * torch.randn(latents.shape, generator=generator)
            decoded = vae.decode(noisy).sample.float()
        error = decoded - batch
        mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        spread = mean.square().mean() + (deviation - 1).square().mean()
        return error.abs().mean() + 2 * error.square().mean() + 0.02 * spread

    def report(_step: int) -> str:
        return f"{psnr_db(vae, pixels[-256:]):.1f} dB"

    run_stage(Stage("autoencoder", vae, num_steps, 2e-3, loss, report, 100), folder)
    latents = encode_all(vae, pixels[:2000])
    vae.register_to_config(scaling_factor=round(1 / float(latents.std()), 4))
    say(f"autoencoder: {psnr_db(vae, pixels[-256:]):.1f} dB, scaling factor {vae.config.scaling_factor}")
    return vae


def train_text_encoder(seed: int, num_steps: int, folder: Path) -> tuple[Any, Any]:
    """Learn to tell shape, colour and background from a prompt; returns tokenizer and text encoder.

    What the UNet is then given is easy to read: the mean of the token states names all three. It is frozen later.
    """
    import torch
    import torch.nn.functional as F

    rng = random.Random(f"tokenizer/{seed}")
    tokenizer = build_tokenizer([compose(random_one_shape(rng), rng)[0] for _ in range(NUM_TOKENIZER_PROMPTS)])
    torch.manual_seed(seed)
    encoder = build_text_encoder(tokenizer)
    sizes = (len(SHAPES) + 1, len(COLOURS) + 1, len(COLOURS) + 1)
    head = torch.nn.Linear(encoder.config.hidden_size, sum(sizes))
    both = torch.nn.ModuleList([encoder, head])

    def logits_of(rng: random.Random, num: int) -> tuple[Any, Any]:
        pairs = [compose(random_one_shape(rng), rng) for _ in range(num)]
        ids = tokenize(tokenizer, [prompt for prompt, _ in pairs])
        states = encoder(ids).last_hidden_state.float()
        return head(states.mean(1)).split(sizes, -1), torch.tensor(fact_classes([facts for _, facts in pairs]))

    def loss(step: int) -> Any:
        with autocast():
            logits, classes = logits_of(random.Random(f"text/{seed}/{step}"), 128)
        return sum(F.cross_entropy(part.float(), classes[:, i]) for i, part in enumerate(logits))

    def report(_step: int) -> str:
        with torch.no_grad():
            logits, classes = logits_of(random.Random("text/held-out"), 512)
        right = torch.stack([part.argmax(-1) == classes[:, i] for i, part in enumerate(logits)])
        return f"{right.all(0).float().mean():.1%} of prompts understood"

    run_stage(Stage("text", both, num_steps, 2e-3, loss, report, 100), folder)
    return tokenizer, encoder.requires_grad_(False)


def encode_all(vae: Any, pixels: Any) -> Any:
    """Raw latents of pictures, float32 [num, channels, side, side]."""
    import torch

    with torch.no_grad(), autocast():
        parts = [vae.encode(as_input(pixels[i : i + 100])).latents.float() for i in range(0, len(pixels), 100)]
    return torch.cat(parts)


def psnr_db(vae: Any, pixels: Any) -> float:
    """Peak signal-to-noise ratio of pictures that went through the autoencoder, in dB."""
    import torch

    with torch.no_grad():
        wanted = as_input(pixels)
        error = (vae.decode(vae.encode(wanted).latents).sample.clamp(-1, 1) - wanted) / 2
    return float(-10 * torch.log10(error.square().mean()))


def as_input(pixels: Any) -> Any:
    """uint8 [num, side, side, 3] to float32 [num, 3, side, side] from -1 to 1."""
    import torch

    scaled = torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    return scaled.contiguous(memory_format=torch.channels_last)


def _crops(pixels: Any, num: int, generator: Any) -> Any:
    import numpy as np
    import torch

    side = pixels.shape[1]
    chosen = torch.randint(len(pixels), (num,), generator=generator).tolist()
    corners = (torch.randint((side - CROP_PX) // 8 + 1, (num, 2), generator=generator) * 8).tolist()
    crops = [pixels[i, y : y + CROP_PX, x : x + CROP_PX] for i, (y, x) in zip(chosen, corners, strict=True)]
    return as_input(np.stack(crops))


def _whole(pixels: Any, num: int, generator: Any) -> Any:
    import torch

    return as_input(pixels[torch.randint(len(pixels), (num,), generator=generator).numpy()])


def save_first_parts(vae: Any, tokenizer: Any, text_encoder: Any, out: Path) -> None:
    """Write autoencoder, tokenizer and text encoder as the model folder's recipe reads them."""
    save_part(vae, out / "vae.safetensors", scaling_factor=str(vae.config.scaling_factor))
    save_part(text_encoder, out / "text_encoder.safetensors")
    tokenizer.save_pretrained(out)
