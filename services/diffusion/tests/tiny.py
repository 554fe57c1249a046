"""Tiny pipelines with random weights, in diffusers' layout, made by the tests themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """One token per letter."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=32)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of a few letters; others are unknown."""
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 3, "green": 4, "star": 5, "circle": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def clip_text(kind: type[Any] = CLIPTextModel, projection: int = 32) -> Any:
    config = CLIPTextConfig(
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        vocab_size=2 + 2 * len(_LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        projection_dim=projection,
    )
    return kind(config).eval()


def t5_text(width: int) -> T5EncoderModel:
    config = T5Config(vocab_size=7, d_model=width, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return T5EncoderModel(config).eval()


def vae(latent_channels: int = 4, shift: float | None = None) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        latent_channels=latent_channels,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        sample_size=32,
        shift_factor=shift,
        use_quant_conv=shift is None,
        use_post_quant_conv=shift is None,
    )


def unet(**more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        **{
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            **more,
        }
    )


SCHEDULERS = {
    "ddim": lambda: DDIMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", rescale_betas_zero_snr=True,
        timestep_spacing="trailing", clip_sample=False,
    ),
    "dpm": lambda: DPMSolverMultistepScheduler(beta_schedule="scaled_linear", steps_offset=1),
    "euler_a": lambda: EulerAncestralDiscreteScheduler(beta_schedule="scaled_linear", steps_offset=1),
}  # fmt: skip


def stable_diffusion(folder: Path, scheduler: str = "ddim") -> StableDiffusionPipeline:
    torch.manual_seed(0)
    pipe = StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(folder / "words"),
        unet=unet(),
        scheduler=SCHEDULERS[scheduler](),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _saved(pipe, folder)


def stable_diffusion_xl(folder: Path) -> StableDiffusionXLPipeline:
    torch.manual_seed(0)
    tokenizer = clip_tokenizer(folder / "words")
    pipe = StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=clip_text(),
        text_encoder_2=clip_text(CLIPTextModelWithProjection),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet(
            cross_attention_dim=64,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32,
        ),
        scheduler=SCHEDULERS["ddim"](),
        add_watermarker=False,
    )
    return _saved(pipe, folder)


def stable_diffusion_3(folder: Path) -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    tokenizer = clip_tokenizer(folder / "words")
    pipe = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            out_channels=4,
        ),
        vae=vae(shift=0.05),
        text_encoder=clip_text(CLIPTextModelWithProjection),
        text_encoder_2=clip_text(CLIPTextModelWithProjection),
        text_encoder_3=t5_text(64),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return _saved(pipe, folder)


def pixart(folder: Path) -> PixArtSigmaPipeline:
    torch.manual_seed(0)
    pipe = PixArtSigmaPipeline(
        transformer=PixArtTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            caption_channels=32,
        ),
        vae=vae(),
        text_encoder=t5_text(32),
        tokenizer=t5_tokenizer(),
        scheduler=DPMSolverMultistepScheduler(),
    )
    return _saved(pipe, folder)


def _saved(pipe: Any, folder: Path) -> Any:
    pipe.save_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe
