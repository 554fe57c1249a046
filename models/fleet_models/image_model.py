"""The image model: its sizes, how its parts are built, and the diffusers folder they become."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_models.folders import is_prepared, write_folder

NAME = "omnifleet-image"
VERSION = "1"
WEIGHTS_FOLDER = "image"
PARTS = ("vae", "text_encoder", "unet")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

LATENT_SIDE = 8
LATENT_CHANNELS = 16
TEXT_WIDTH = 128
UNET_WIDTH = 128
MAX_PROMPT_TOKENS = 28
START_OF_TEXT, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Parts:
    """The four things that a Stable-Diffusion pipeline is made of, beside its scheduler."""

    vae: Any
    tokenizer: Any
    text_encoder: Any
    unet: Any


def prepare_image_model(cache: Path, progress: Callable[[str], None]) -> Path:
    """Assemble the image model once; later calls return at once and import nothing heavy.

    Args:
        cache: the folder that holds one sub-folder per model.
        progress: called with one line of text per step.
    Returns:
        `cache / NAME`: a folder for `DiffusionPipeline.from_pretrained` (StableDiffusionPipeline, float32).
    Raises:
        FileNotFoundError: our trained weights are missing.
    """
    folder = cache / NAME
    weights = find_weights()
    digest = hashlib.sha256()
    for path in sorted(weights.iterdir()):
        if path.name in TOKENIZER_FILES or path.suffix == ".safetensors":
            digest.update(path.name.encode() + path.read_bytes())
    version = f"{VERSION}-{digest.hexdigest()[:16]}"
    if is_prepared(folder, version):
        return folder
    with write_folder(folder, version) as fresh:
        progress(f"{NAME}: joining autoencoder, text encoder and UNet")
        as_pipeline(load_parts(weights)).save_pretrained(fresh)
        for path in fresh.rglob("*.safetensors"):
            path.chmod(0o644)  # safetensors writes for the owner alone; services may run as somebody else
    progress(f"{NAME}: ready")
    return folder


def find_weights() -> Path:
    """The folder of trained weights: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "weights", package.parent / "weights"):
        if (folder / WEIGHTS_FOLDER / "unet.safetensors").is_file():
            return folder / WEIGHTS_FOLDER
    raise FileNotFoundError("no weights of the image model: train it with python -m fleet_models.train_diffusion")


def as_pipeline(parts: Parts) -> Any:
    """Put the parts and a scheduler into one StableDiffusionPipeline."""
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        unet=parts.unet,
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def build_scheduler() -> Any:
    """DDIM over v-prediction; the last training step is pure noise, so sampling starts where training did."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


def build_vae(scaling_factor: float = 1.0) -> Any:
    """64 px to 8 x 8 latents of 16 channels; `scaling_factor` makes their standard deviation one."""
    from diffusers import AutoencoderTiny

    width = (64, 64, 64, 64)
    return AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(0, 1, 1, 2),
        num_decoder_blocks=(2, 1, 1, 0),
        latent_channels=LATENT_CHANNELS,
        scaling_factor=scaling_factor,
    )


def build_text_encoder(tokenizer: Any) -> Any:
    """A CLIP text model of two layers."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_PROMPT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def build_unet() -> Any:
    """Two levels, attention at the upper one and in the middle; the pooled prompt scales and shifts every block.

    Cross-attention alone was too weak for so small a model: colours came out right and shapes did not.
    """
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(UNET_WIDTH, UNET_WIDTH),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # diffusers reads it as the number of heads
        norm_num_groups=16,
        use_linear_projection=True,
        resnet_time_scale_shift="scale_shift",
        addition_embed_type="text",
        addition_embed_type_num_heads=4,
    )


def build_tokenizer(prompts: Sequence[str]) -> Any:
    """A CLIP tokenizer whose byte pairs are those of the prompts: their words are whole, others fall into pieces."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    plain = CLIPTokenizer()
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer = plain.backend_tokenizer.normalizer
    learner.pre_tokenizer = plain.backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=20, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    learner.train_from_iterator(prompts, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    words = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    words += [word for word in dict.fromkeys(a + b for a, b in merges) if word not in set(words)]
    vocabulary = {word: i for i, word in enumerate([*words, START_OF_TEXT, END_OF_TEXT])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_PROMPT_TOKENS)


def tokenize(tokenizer: Any, prompts: Sequence[str]) -> Any:
    """Token ids [num, MAX_PROMPT_TOKENS], padded and cut as the pipeline does."""
    return tokenizer(
        list(prompts), padding="max_length", max_length=MAX_PROMPT_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def load_parts(folder: Path) -> Parts:
    """Read what save_part wrote; every part comes as float32."""
    from safetensors import safe_open
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=MAX_PROMPT_TOKENS)
    with safe_open(folder / "vae.safetensors", "pt") as weights:
        scaling_factor = float(weights.metadata()["scaling_factor"])
    built = build_vae(scaling_factor), build_text_encoder(tokenizer), build_unet()
    for name, module in zip(PARTS, built, strict=True):
        load_weights(module, folder / f"{name}.safetensors")
    vae, text_encoder, unet = built
    return Parts(vae, tokenizer, text_encoder, unet)


def load_weights(module: Any, path: Path) -> None:
    """Fill a module from a float16 file."""
    from safetensors.torch import load_file

    module.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    module.eval()


def save_part(module: Any, path: Path, **metadata: str) -> None:
    """Write a module's weights as float16."""
    import torch
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    halves = {name: value.detach().to(torch.float16).contiguous() for name, value in module.state_dict().items()}
    save_file(halves, path, metadata={"format": "pt", **metadata})
    path.chmod(0o644)
