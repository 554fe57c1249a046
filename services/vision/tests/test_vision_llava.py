"""The real encoder against transformers' own LLaVA, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_common.errors import EngineOutOfMemoryError
from fleet_vision.engine.port import EncoderImage

pytestmark = pytest.mark.models


def write_llava(folder: Path, tower: str, **config: Any) -> Any:
    """A LLaVA with random weights; returns transformers' model."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        SiglipVisionConfig,
    )

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision_class = {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig}[tower]
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision_class(image_size=32, patch_size=8, **sizes),
            text_config=LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes),
            image_token_index=63,
            **config,
        )
    ).eval()
    model.save_pretrained(folder)
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def make_encoder(folder: Path) -> Any:
    from fleet_vision.engine.real import CheckpointEncoder

    return CheckpointEncoder(str(folder), {}, num_threads=1)


def images(count: int) -> list[EncoderImage]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return [EncoderImage(one, "", 16) for one in pixels]


def expected_features(model: Any, batch: list[EncoderImage], **config: Any) -> np.ndarray:
    import torch
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    pixels = processor([one.pixels.transpose(1, 2, 0) for one in batch], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        return torch.stack(list(model.model.get_image_features(pixels, **config).pooler_output)).numpy()


@pytest.mark.parametrize(
    ("tower", "config", "num_tokens"),
    [
        ("clip", {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}, 16),
        ("clip", {"vision_feature_layer": -2, "vision_feature_select_strategy": "full"}, 17),
        ("clip", {"vision_feature_layer": [-1, -2], "vision_feature_select_strategy": "default"}, 16),
        ("siglip", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, 16),
    ],
)
def test_features_are_those_of_transformers(
    tmp_path: Path, tower: str, config: dict[str, Any], num_tokens: int
) -> None:
    model = write_llava(tmp_path, tower, **config)
    encoder = make_encoder(tmp_path)

    facts = encoder.load()
    got = np.stack(encoder.encode(images(3)))

    assert (facts.num_tokens, facts.hidden_size) == (num_tokens, 32)
    assert np.abs(got - expected_features(model, images(3), **config)).max() < 1e-5


def test_batch_equals_one_by_one(tmp_path: Path) -> None:
    write_llava(tmp_path, "clip")
    encoder = make_encoder(tmp_path)
    encoder.load()

    together = encoder.encode(images(5))
    alone = [encoder.encode([image])[0] for image in images(5)]

    assert max(np.abs(a - b).max() for a, b in zip(together, alone, strict=True)) < 1e-4


def test_only_tower_and_projector_are_needed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_llava(tmp_path, "clip")
    weights = load_file(tmp_path / "model.safetensors")
    old_names = {
        "vision_tower.vision_model." + name.split("vision_tower.")[1].removeprefix("vision_model."): value
        for name, value in weights.items()
        if "vision_tower." in name
    }
    projector = {name.removeprefix("model."): v for name, v in weights.items() if "multi_modal_projector" in name}
    expected_encoder = make_encoder(tmp_path)
    expected_encoder.load()
    expected = expected_encoder.encode(images(1))[0]
    (tmp_path / "model.safetensors").unlink()
    save_file(old_names, tmp_path / "model-00001-of-00002.safetensors")
    save_file(projector, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(old_names, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(projector, "model-00002-of-00002.safetensors")
    weight_map["language_model.lm_head.weight"] = "model-00003-of-00003.safetensors"  # not there, and not read
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    encoder = make_encoder(tmp_path)

    encoder.load()

    assert np.array_equal(encoder.encode(images(1))[0], expected)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_llava(tmp_path, "clip")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: v for name, v in weights.items() if "projector" not in name}, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match="multi_modal_projector"):
        make_encoder(tmp_path).load()


def test_other_families_are_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "idefics3"}))

    with pytest.raises(ValueError, match="idefics3"):
        make_encoder(tmp_path).load()


def test_out_of_memory_is_told_apart(tmp_path: Path) -> None:
    write_llava(tmp_path, "clip")
    encoder = make_encoder(tmp_path)
    encoder.load()
    # A view of one byte that claims petabytes: the allocation fails before anything is touched.
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (3, 1 << 25, 1 << 25), (0, 0, 0))

    with pytest.raises(EngineOutOfMemoryError):
        encoder.encode([EncoderImage(huge, "", 16)])
