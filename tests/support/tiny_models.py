"""Tiny random checkpoints of every vision-language family, as transformers saves the big ones.

The tokenizer knows bytes and the family's special tokens only; weights are drawn wide enough that greedy answers differ
from picture to picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

HIDDEN_SIZE = 128
_TEXT = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_TURNS = ("<|im_start|>", "<|im_end|>")
_QWEN_MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_AUDIO = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
#: Mel bins of the tiny Qwen2-Audio checkpoint.
AUDIO_MEL_BINS = 32
_INTERN_MEDIA = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
#: Smallest and largest picture of the tiny Qwen checkpoints: 4 to 64 tokens of 28 x 28 pixels.
QWEN_MIN_PIXELS, QWEN_MAX_PIXELS = 4 * 28 * 28, 64 * 28 * 28
INTERN_TILE_PX, INTERN_MAX_TILES = 32, 4


def write_llava(folder: Path) -> Path:
    """LLaVA with a CLIP tower of 32 x 32 pixels: 16 tokens a picture."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    ids = _write_tokenizer(folder, ("<image>",), "<image>")
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **tower),
        text_config=LlamaConfig(vocab_size=len(ids), **_TEXT),
        image_token_index=ids["<image>"],
        image_seq_length=16,
    )
    _write_weights(LlavaForConditionalGeneration, config, folder, ids)
    tower_name = "vision_tower."  # with `model.` before it or not: that depends on the release of transformers
    longer = f"{tower_name}vision_model."
    _rename(folder, lambda name: name if longer in name else name.replace(tower_name, longer))
    size = {"height": 32, "width": 32}
    _write_image_processor(folder, "CLIPImageProcessor", "LlavaProcessor", size=size, crop_size=size)
    processor = {"processor_class": "LlavaProcessor", "patch_size": 8, "vision_feature_select_strategy": "default"}
    _write_json(folder / "processor_config.json", {**processor, "image_token": "<image>"})
    return folder


def write_qwen2_vl(folder: Path) -> Path:
    """Qwen2-VL: any resolution, 28 x 28 pixels a token."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tower = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": HIDDEN_SIZE}
    return _write_qwen(folder, Qwen2VLConfig, Qwen2VLForConditionalGeneration, "Qwen2VLProcessor", tower)


def write_qwen2_5_vl(folder: Path) -> Path:
    """Qwen2.5-VL: the same with windows of 4 x 4 tokens in its first block and a second block that sees all."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": HIDDEN_SIZE}
    tower |= {"window_size": 112, "fullatt_block_indexes": [1]}
    return _write_qwen(folder, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, "Qwen2_5_VLProcessor", tower)


def write_internvl(folder: Path) -> Path:
    """InternVL (transformers' layout): tiles of 32 x 32 pixels and a thumbnail, 4 tokens each."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config

    ids = _write_tokenizer(folder, _INTERN_MEDIA, "<IMG_CONTEXT>", _INTERN_TOKEN_NAMES)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(image_size=[INTERN_TILE_PX] * 2, patch_size=[8, 8], **tower),
        text_config=Qwen2Config(vocab_size=len(ids), tie_word_embeddings=False, **_TEXT),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
    )
    # Many tokens a picture: each must speak up, or they drown in one another and every answer is the same.
    _write_weights(
        InternVLForConditionalGeneration, config, folder, ids, louder={"projector.linear_2": 4.0, "k_proj": 2.0}
    )
    size = {"height": INTERN_TILE_PX, "width": INTERN_TILE_PX}
    more = {"size": size, "crop_to_patches": True, "min_patches": 1, "max_patches": INTERN_MAX_TILES}
    _write_image_processor(folder, "GotOcr2ImageProcessor", "InternVLProcessor", **more)
    _write_json(folder / "video_preprocessor_config.json", {"video_processor_type": "InternVLVideoProcessor"})
    _write_json(folder / "processor_config.json", {"processor_class": "InternVLProcessor", "image_seq_length": 4})
    return folder


def write_qwen2_audio(folder: Path) -> Path:
    """Qwen2-Audio: windows of 30 seconds, as vLLM's model file insists; 25 tokens a second."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    ids = _write_tokenizer(folder, _QWEN_AUDIO, "<|audio_bos|><|AUDIO|><|audio_eos|>")
    tower = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
    config = Qwen2AudioConfig(
        audio_config={"num_mel_bins": AUDIO_MEL_BINS, "max_source_positions": 1500, **tower},
        text_config={"vocab_size": len(ids), "tie_word_embeddings": False, **_TEXT},
        audio_token_index=ids["<|AUDIO|>"],
    )
    _write_weights(Qwen2AudioForConditionalGeneration, config, folder, ids)
    _rename(folder, lambda name: name.replace("language_model.model.model.", "language_model.model."))
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor"}
    sizes = {"feature_size": AUDIO_MEL_BINS, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
    _write_json(
        folder / "preprocessor_config.json",
        {**extractor, **sizes, "chunk_length": 30, "return_attention_mask": True},
    )
    return folder


#: Every family this release serves, by its `model_type`.
WRITERS = {
    "llava": write_llava,
    "qwen2_vl": write_qwen2_vl,
    "qwen2_5_vl": write_qwen2_5_vl,
    "internvl": write_internvl,
    "qwen2_audio": write_qwen2_audio,
}

#: Those of them that hear.
HEARING = frozenset({"qwen2_audio"})

_INTERN_TOKEN_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def _write_qwen(folder: Path, config_class: Any, model_class: Any, processor: str, tower: dict[str, Any]) -> Path:
    ids = _write_tokenizer(folder, _QWEN_MEDIA, "<|vision_start|><|image_pad|><|vision_end|>")
    # Three sections of a head's 32 dimensions: time, height and width.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = config_class(
        vision_config=tower,
        text_config={"vocab_size": len(ids), "rope_parameters": rope, "tie_word_embeddings": False, **_TEXT},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    _write_weights(model_class, config, folder, ids)
    pixels = {"min_pixels": QWEN_MIN_PIXELS, "max_pixels": QWEN_MAX_PIXELS}
    _write_image_processor(folder, "Qwen2VLImageProcessor", processor, **pixels)
    return folder


def _write_tokenizer(
    folder: Path, media: Sequence[str], image: str, names: dict[str, str] | None = None
) -> dict[str, int]:
    """Bytes as tokens, and special ones behind them; returns every token's id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*_TURNS, *media)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 4096,
        "extra_special_tokens": names or {},
        **(names or {}),
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", image))
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids


_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _write_weights(
    model_class: Any, config: Any, folder: Path, ids: dict[str, int], louder: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Random weights; those with a word of `louder` in their name are so many times as large."""
    import torch

    torch.manual_seed(0)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                width = 1.0 if "embed_tokens" in name else 1.5 / parameter[0].numel() ** 0.5
                width *= math.prod(factor for word, factor in louder.items() if word in name)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(folder)


def _rename(folder: Path, published: Callable[[str], str]) -> None:
    """Published checkpoints, and so vLLM, name some tensors otherwise than transformers 5 writes them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    renamed = {published(name): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})


def _write_image_processor(folder: Path, kind: str, processor: str, **settings: Any) -> None:
    # As save_pretrained writes them: vLLM normalises on the device only with numbers that are spelled out.
    numbers = {"do_normalize": True, "do_rescale": True, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}
    named = {"image_processor_type": kind, "processor_class": processor, **numbers, **settings}
    _write_json(folder / "preprocessor_config.json", named)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
