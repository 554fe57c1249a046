"""Pictures to latents and back, noise on them, and what of them an edit has to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor

from fleet_diffusion.core.canvas import Canvas, Pixels, num_steps_from


@dataclass(slots=True)
class Known:
    """What a mask keeps. All [1, channels, h, w], the mask [1, 1, h, w]: 1 where the picture may change."""

    latents: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where the first step begins, and the timesteps from there on."""

    latents: torch.Tensor
    timesteps: torch.Tensor
    known: Known | None = None


def can_encode(pipe: Any, num_channels: int) -> bool:
    """Whether an edit can begin from a picture: it becomes the denoiser's latents, and noise can be put on them."""
    config = pipe.vae.config
    has_noise = hasattr(pipe.scheduler, "scale_noise") or hasattr(pipe.scheduler, "add_noise")
    return hasattr(pipe.vae, "encode") and config.get("latent_channels") == num_channels and has_noise


def from_noise(scheduler: Any, noise: torch.Tensor) -> Beginning:
    """A picture of nothing but its prompt."""
    # Flow matching starts from plain noise.
    return Beginning(noise * getattr(scheduler, "init_noise_sigma", 1.0), scheduler.timesteps)


def from_canvas(
    pipe: Any, scheduler: Any, canvas: Canvas, num_steps: int, generator: torch.Generator, like: torch.Tensor
) -> Beginning:
    """An edit: the canvas with as much noise as the first of its steps expects.

    As diffusers' image-to-image and inpainting pipelines have it, random numbers in their order too.

    Args:
        like: any tensor of the latents' shape, type and device.
    """
    image = _encoded(pipe, canvas.pixels, generator).to(like)
    noise = randn_tensor(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    order = getattr(scheduler, "order", 1)
    first = (num_steps - num_steps_from(num_steps, canvas.strength)) * order
    timesteps = scheduler.timesteps[first:]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    is_noise_only = canvas.strength >= 1.0
    latents = from_noise(scheduler, noise).latents if is_noise_only else noised(scheduler, image, noise, timesteps[0])
    if canvas.mask is None:
        return Beginning(latents.to(like.dtype), timesteps)
    # What is kept of a latent that is only partly to change would be seen as an edge: it may change as a whole.
    mask = torch.nn.functional.adaptive_max_pool2d(
        torch.from_numpy(canvas.mask.astype(np.float32))[None, None], like.shape[-2:]
    )
    return Beginning(latents.to(like.dtype), timesteps, Known(image, noise, mask.to(like)))


def noised(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Latents with the noise of a timestep."""
    scale = getattr(scheduler, "scale_noise", None)
    made: torch.Tensor = (
        scheduler.add_noise(latents, noise, timestep[None])
        if scale is None
        else scale(latents, timestep[None], noise)  # flow matching
    )
    return made


def with_known(scheduler: Any, latents: torch.Tensor, known: Known, timestep: torch.Tensor | None) -> torch.Tensor:
    """Latents after a step, with what is kept put back at the noise of the next one (None: there is none)."""
    kept = known.latents
    if timestep is not None:
        kept = noised(scheduler, kept, known.noise, timestep).to(latents.dtype)
    return (1 - known.mask) * kept + known.mask * latents


def unscaled(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The denoiser's latents as the autoencoder's."""
    config = vae.config
    if (stats := _stats(config, latents)) is not None:
        mean, std = stats
        return latents * std / config.scaling_factor + mean
    return latents / config.scaling_factor + (config.get("shift_factor") or 0.0)


def _scaled(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Undo `unscaled`."""
    config = vae.config
    if (stats := _stats(config, latents)) is not None:
        mean, std = stats
        return (latents - mean) * config.scaling_factor / std
    return (latents - (config.get("shift_factor") or 0.0)) * config.scaling_factor


def _stats(config: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return None
    shape = (1, -1, 1, 1)
    return torch.tensor(mean).view(shape).to(like), torch.tensor(std).view(shape).to(like)


def _encoded(pipe: Any, pixels: Pixels, generator: torch.Generator) -> torch.Tensor:
    image = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None] * 2 - 1
    found = pipe.vae.encode(image.to(pipe.vae.device, pipe.vae.dtype))
    # Small autoencoders give the latents themselves, others where to draw them.
    drawn = found.latent_dist.sample(generator) if hasattr(found, "latent_dist") else found.latents
    return _scaled(pipe.vae, drawn)
