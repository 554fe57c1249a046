"""The vision-language model as one LLaVA-layout folder: our tower, projector and adapter over SmolLM2."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet_models import tower
from fleet_models.adapter import ADAPTER_NAME, merge_adapter
from fleet_models.folders import is_prepared, write_folder
from fleet_models.smollm2 import prepare_smollm2, write_tokenizer_config

NAME = "omnifleet-vlm"
VERSION = "2"
WEIGHTS_NAMES = (tower.WEIGHTS_NAME, ADAPTER_NAME)
IMAGE_TOKEN = "<image>"
# Embedding rows are added 64 at a time, so that tensor-parallel ranks can split them evenly.
VOCABULARY_MULTIPLE = 64
# New rows start as a copy of this token, which is never generated (a zero row could win an argmax).
UNUSED_TOKEN_ID = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'image_url', 'input_image'] %}{{ '<image>' }}"
    "{% elif part['type'] in ['text', 'input_text'] %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def prepare_vlm(cache: Path, progress: Callable[[str], None]) -> Path:
    """Assemble the vision-language model once; later calls return at once and import nothing heavy.

    Args:
        cache: the folder that holds one sub-folder per model; SmolLM2 is prepared there first if need be.
        progress: called with one line of text per step.
    Returns:
        `cache / NAME`: a folder for LlavaForConditionalGeneration; language bfloat16, vision float32.
    Raises:
        FileNotFoundError: SmolLM2's package or our trained weights are missing.
    """
    folder = cache / NAME
    trained = find_weights()
    digest = hashlib.sha256(b"".join((trained / name).read_bytes() for name in WEIGHTS_NAMES))
    version = f"{VERSION}-{digest.hexdigest()[:16]}"
    if is_prepared(folder, version):
        return folder
    language_model = prepare_smollm2(cache, progress)
    with write_folder(folder, version) as fresh:
        progress(f"{NAME}: joining {trained.name} and {language_model.name}")
        image_token_id, vocab_size = _save_tokenizer(language_model, fresh)
        _save_config(language_model, fresh, image_token_id, vocab_size)
        _save_processor(fresh)
        _save_weights(language_model, trained, fresh, vocab_size)
    progress(f"{NAME}: ready")
    return folder


def find_weights() -> Path:
    """The folder of trained weights: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "weights", package.parent / "weights"):
        if all((folder / name).is_file() for name in WEIGHTS_NAMES):
            return folder
    raise FileNotFoundError(f"no {' and '.join(WEIGHTS_NAMES)}: train them with make train-vision")


def _save_tokenizer(language_model: Path, folder: Path) -> tuple[int, int]:
    """Add the image token; returns its id and the number of embedding rows that the model now needs."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(language_model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, CHAT_TEMPLATE, image_token=IMAGE_TOKEN, processor_class="LlavaProcessor")
    size = tokenizer.get_vocab_size()
    image_token_id = tokenizer.token_to_id(IMAGE_TOKEN)
    return image_token_id, -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _save_config(language_model: Path, folder: Path, image_token_id: int, vocab_size: int) -> None:
    text_config = json.loads((language_model / "config.json").read_text())
    text_config |= {"vocab_size": vocab_size, "dtype": "float32"}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "float32",
        "image_token_index": image_token_id,
        "image_token_id": image_token_id,
        "image_seq_length": tower.NUM_IMAGE_TOKENS,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": tower.VISION_FEATURE_LAYER,
        "vision_feature_select_strategy": tower.VISION_FEATURE_STRATEGY,
        "tie_word_embeddings": True,
        "bos_token_id": text_config["bos_token_id"],
        "eos_token_id": text_config["eos_token_id"],
        "pad_token_id": text_config["pad_token_id"],
        "text_config": text_config,
        "vision_config": tower.VISION_CONFIG,
    }
    _write_json(folder / "config.json", config)
    (folder / "generation_config.json").write_text((language_model / "generation_config.json").read_text())


def _save_processor(folder: Path) -> None:
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": tower.IMAGE_SIDE_PX, "width": tower.IMAGE_SIDE_PX},
        "resample": 3,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(tower.PIXEL_MEAN),
        "image_std": list(tower.PIXEL_STD),
    }
    _write_json(folder / "preprocessor_config.json", image_processor)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": tower.PATCH_SIDE_PX,
        "num_additional_image_tokens": 1,  # the class token, which the "default" strategy drops again
        "vision_feature_select_strategy": tower.VISION_FEATURE_STRATEGY,
    }
    _write_json(folder / "processor_config.json", processor)


def _save_weights(language_model: Path, trained: Path, folder: Path, vocab_size: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights: dict[str, Any] = {}
    spoken = load_file(language_model / "model.safetensors")
    merge_adapter(spoken, load_file(trained / ADAPTER_NAME))
    for name, value in spoken.items():
        weights["model.language_model." + name.removeprefix("model.")] = value
    rows = weights["model.language_model.embed_tokens.weight"]
    added = rows[UNUSED_TOKEN_ID].repeat(vocab_size - len(rows), 1)
    weights["model.language_model.embed_tokens.weight"] = torch.cat([rows, added])
    weights |= {name: value.to(torch.float32) for name, value in load_file(trained / tower.WEIGHTS_NAME).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
