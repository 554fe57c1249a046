"""What differs between families of diffusers' pipelines: conditioning, the call of the denoiser, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Rows = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Condition:
    """What a prompt means to the denoiser: tensors [1, ...] by argument, for it and for what is not wanted."""

    positive: Rows
    negative: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for rows in (self.positive, self.negative) for tensor in rows.values())


class Family(Protocol):
    """One kind of pipeline.

    Attributes:
        denoiser: the network that predicts, UNet or transformer.
        size_step: pixels; sizes are multiples of it.
        tokenizer, max_tokens: of the text encoder that sees most of a prompt.
    """

    denoiser: Any
    size_step: int
    tokenizer: Any
    max_tokens: int

    def encode(self, prompt: str, negative_prompt: str) -> Condition:
        """Run the text encoders."""

    def with_size(self, rows: Rows, width: int, height: int) -> Rows:
        """Conditioning that depends on the size of the picture added."""

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Rows) -> torch.Tensor:
        """One pass. latents [n, channels, h, w], timesteps [n] (each row its own), rows [n, ...] -> like latents."""


def _text(prompt: str) -> str | None:
    """Pipelines take "nothing unwanted" as None: some then condition on zeros instead of an empty text."""
    return prompt or None


class StableDiffusion:
    """StableDiffusionPipeline: CLIP text, UNet."""

    def __init__(self, pipe: Any) -> None:
        if pipe.unet.config.time_cond_proj_dim is not None:
            raise ValueError("UNets with a guidance embedding (LCM) are not supported yet")
        self._pipe = pipe
        self.denoiser = pipe.unet
        self.size_step = pipe.vae_scale_factor
        self.tokenizer = pipe.tokenizer
        self.max_tokens = pipe.tokenizer.model_max_length

    def encode(self, prompt: str, negative_prompt: str) -> Condition:
        positive, negative = self._pipe.encode_prompt(
            prompt, self.denoiser.device, 1, True, negative_prompt=_text(negative_prompt)
        )
        return Condition({"encoder_hidden_states": positive}, {"encoder_hidden_states": negative})

    def with_size(self, rows: Rows, width: int, height: int) -> Rows:
        return rows

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Rows) -> torch.Tensor:
        made: torch.Tensor = self.denoiser(latents, timesteps, return_dict=False, **rows)[0]
        return made


class StableDiffusionXL(StableDiffusion):
    """StableDiffusionXLPipeline: two text encoders, and the size as a condition."""

    def encode(self, prompt: str, negative_prompt: str) -> Condition:
        positive, negative, pooled, negative_pooled = self._pipe.encode_prompt(
            prompt=prompt,
            device=self.denoiser.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=True,
            negative_prompt=_text(negative_prompt),
        )
        return Condition(
            {"encoder_hidden_states": positive, "text_embeds": pooled},
            {"encoder_hidden_states": negative, "text_embeds": negative_pooled},
        )

    def with_size(self, rows: Rows, width: int, height: int) -> Rows:
        encoder = self._pipe.text_encoder_2
        pooled = rows["text_embeds"]
        width_of_pooled = int(pooled.shape[-1]) if encoder is None else encoder.config.projection_dim
        time_ids = self._pipe._get_add_time_ids(
            (height, width), (0, 0), (height, width), pooled.dtype, text_encoder_projection_dim=width_of_pooled
        )
        return {**rows, "time_ids": time_ids.to(pooled.device)}

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Rows) -> torch.Tensor:
        added = {name: rows[name] for name in ("text_embeds", "time_ids")}
        made: torch.Tensor = self.denoiser(
            latents,
            timesteps,
            encoder_hidden_states=rows["encoder_hidden_states"],
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return made


class StableDiffusion3:
    """StableDiffusion3Pipeline: a transformer over patches, flow matching."""

    #: Tokens of T5, as the pipeline's own call has it.
    _T5_TOKENS = 256

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.denoiser = pipe.transformer
        self.size_step = pipe.vae_scale_factor * pipe.patch_size
        has_t5 = pipe.text_encoder_3 is not None
        self.tokenizer = pipe.tokenizer_3 if has_t5 else pipe.tokenizer
        self.max_tokens = self._T5_TOKENS if has_t5 else pipe.tokenizer_max_length

    def encode(self, prompt: str, negative_prompt: str) -> Condition:
        positive, negative, pooled, negative_pooled = self._pipe.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            prompt_3=None,
            device=self.denoiser.device,
            do_classifier_free_guidance=True,
            negative_prompt=_text(negative_prompt),
            max_sequence_length=self._T5_TOKENS,
        )
        return Condition(
            {"encoder_hidden_states": positive, "pooled_projections": pooled},
            {"encoder_hidden_states": negative, "pooled_projections": negative_pooled},
        )

    def with_size(self, rows: Rows, width: int, height: int) -> Rows:
        return rows

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Rows) -> torch.Tensor:
        made: torch.Tensor = self.denoiser(hidden_states=latents, timestep=timesteps, return_dict=False, **rows)[0]
        return made


class PixArt:
    """PixArtSigmaPipeline: a DiT with cross-attention to T5."""

    #: Tokens of T5, as the pipeline's own call has it.
    _T5_TOKENS = 300

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.denoiser = pipe.transformer
        self.size_step = pipe.vae_scale_factor * pipe.transformer.config.patch_size
        self.tokenizer = pipe.tokenizer
        self.max_tokens = self._T5_TOKENS

    def encode(self, prompt: str, negative_prompt: str) -> Condition:
        positive, mask, negative, negative_mask = self._pipe.encode_prompt(
            prompt,
            True,
            negative_prompt=negative_prompt,
            num_images_per_prompt=1,
            device=self.denoiser.device,
            clean_caption=False,
            max_sequence_length=self._T5_TOKENS,
        )
        return Condition(
            {"encoder_hidden_states": positive, "encoder_attention_mask": mask},
            {"encoder_hidden_states": negative, "encoder_attention_mask": negative_mask},
        )

    def with_size(self, rows: Rows, width: int, height: int) -> Rows:
        return rows

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Rows) -> torch.Tensor:
        made: torch.Tensor = self.denoiser(
            latents,
            timestep=timesteps,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
            **rows,
        )[0]
        # Some predict their variance too, in as many channels again.
        return made[:, : latents.shape[1]]


#: By the class name in a folder's model_index.json.
FAMILIES: Mapping[str, Callable[[Any], Family]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "PixArtSigmaPipeline": PixArt,
}
