"""Equality with transformers: pixels of its image processors, ids of its chat templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet_preprocess.core.body import ChatBody
from fleet_preprocess.core.internvl import InternVlTiles
from fleet_preprocess.core.log_mel import MelSettings, log_mel
from fleet_preprocess.core.qwen_audio import QwenAudio
from fleet_preprocess.core.qwen_vl import QwenResolution
from fleet_preprocess.core.resize import encoder_pixels, resize_spec
from fleet_preprocess.engine.real import CheckpointPromptEngine
from tests.support.tiny_models import write_qwen2_audio

pytestmark = pytest.mark.models
WriteCheckpoint = Callable[..., Path]

CLIP = {"image_processor_type": "CLIPImageProcessor"}
CASES: list[dict[str, Any]] = [
    CLIP,
    {**CLIP, "size": {"shortest_edge": 30}, "crop_size": {"height": 24, "width": 26}},
    {**CLIP, "size": {"shortest_edge": 20}, "crop_size": {"height": 27, "width": 33}},
    {**CLIP, "size": {"height": 64, "width": 64}, "do_center_crop": False, "resample": 3},
    {**CLIP, "size": 30, "crop_size": 30, "resample": 2},
    {**CLIP, "do_resize": False, "crop_size": {"height": 51, "width": 40}},
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 48, "width": 48}},
    {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "size": {"shortest_edge": 40}, "crop_size": 40},
]


@pytest.mark.parametrize("size", [(60, 40), (40, 61), (33, 33), (7, 300), (5, 9)])
@pytest.mark.parametrize("config", CASES)
def test_pixels_are_those_of_transformers(config: dict[str, Any], size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    classes = {"CLIP": CLIPImageProcessorPil, "Siglip": SiglipImageProcessorPil, "Llava": LlavaImageProcessorPil}
    kind = config["image_processor_type"].removesuffix("ImageProcessor")
    rgb = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    settings = {key: value for key, value in config.items() if key != "image_processor_type"}
    processor = classes[kind](**settings, do_rescale=False, do_normalize=False)

    expected = processor(rgb, input_data_format="channels_last", return_tensors="np")["pixel_values"][0]
    got = encoder_pixels(rgb, resize_spec(config))

    assert np.array_equal(got.transpose(2, 0, 1), expected)


SIZES = [(60, 40), (40, 361), (333, 33), (7, 300), (500, 700), (128, 128)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pixels", [(56 * 56, 28 * 28 * 64), (28 * 28, 28 * 28 * 4)])
def test_pixels_of_qwen_are_those_of_transformers(size: tuple[int, int], pixels: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rgb = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    settings = {"min_pixels": pixels[0], "max_pixels": pixels[1]}
    processor = Qwen2VLImageProcessorPil(**settings, do_rescale=False, do_normalize=False)

    expected = processor(rgb, input_data_format="channels_last", return_tensors="np")
    got = QwenResolution.read({"vision_config": {}}, settings).prepare(rgb, 0)

    _, rows, columns = got.grid
    assert [list(got.grid)] == expected["image_grid_thw"].tolist()
    # [rows, columns] of tokens, of patches in a token, channels, repeated frames, pixels of a patch
    patches = expected["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    assert np.array_equal(patches[:, :, :, :, :, 0], patches[:, :, :, :, :, 1])
    whole = patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 14, columns * 14, 3)
    assert np.array_equal(got.pixels, whole)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_tiles", [1, 4, 12])
def test_tiles_of_internvl_are_those_of_transformers(size: tuple[int, int], max_tiles: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    rgb = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    settings = {"size": {"height": 32, "width": 32}, "max_patches": max_tiles}
    processor = GotOcr2ImageProcessorPil(**settings, crop_to_patches=True, do_rescale=False, do_normalize=False)
    config = {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}}

    expected = processor(rgb, input_data_format="channels_last", return_tensors="np")["pixel_values"]
    got = InternVlTiles.read(config, settings).prepare(rgb, 0)

    assert np.array_equal(got.pixels.transpose(0, 3, 1, 2), expected)
    assert got.num_tokens == 4 * len(expected)


def test_ids_are_those_of_apply_chat_template(write_checkpoint: WriteCheckpoint) -> None:
    from transformers import AutoTokenizer

    folder = write_checkpoint()
    conversation = [
        {"role": "system", "content": "  be brief\n\n"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWas zeigt das? 123 ☃ <b>"}]},
        {"role": "assistant", "content": "the picture <think>x</think>"},
        {"role": "user", "content": "which edge is red?"},
    ]
    sent = [dict(message) for message in conversation]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    sent[1]["content"] = [image, conversation[1]["content"][1]]
    engine = CheckpointPromptEngine(str(folder), {}, "0123456789abcdef")
    engine.load()

    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    ids = engine.chat_ids(msgspec.convert({"messages": sent}, ChatBody).messages, None)

    assert ids == list(expected)


@pytest.mark.parametrize("num_bins", [80, 128])
@pytest.mark.parametrize("num_samples", [321, 16_000, 100_003, 480_000])
def test_features_of_recordings_are_those_of_transformers(num_samples: int, num_bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    random = np.random.default_rng(num_samples)
    samples = (random.uniform(-0.5, 0.5, num_samples) * np.sin(np.arange(num_samples) / 9)).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=num_bins, return_attention_mask=True)

    made = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    settings = MelSettings.read(extractor.to_dict())
    features = log_mel(samples, settings)

    assert np.abs(features - made["input_features"][0]).max() < 1e-4
    assert QwenAudio(settings).num_positions(num_samples) == (int(made["attention_mask"].sum()) - 1) // 2 + 1


#: As Qwen2-Audio-7B-Instruct publishes it.
QWEN_AUDIO_TEMPLATE = (
    "{% set audio_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' or content['type'] == 'audio' %}"
    "{% set audio_count.value = audio_count.value + 1 %}Audio {{ audio_count.value }}: "
    "<|audio_bos|><|AUDIO|><|audio_eos|>\n{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_recordings_are_placed_by_the_published_template_and_never_by_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_qwen2_audio(tmp_path)
    (folder / "chat_template.jinja").write_text(QWEN_AUDIO_TEMPLATE)
    engine = CheckpointPromptEngine(str(folder), {}, "0123456789abcdef")
    facts = engine.load()
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA"}}
    text = {"type": "text", "text": "Who speaks?"}
    faked = {"type": "text", "text": "<|audio_bos|><|AUDIO|><|audio_eos|>"}

    def ids(*parts: dict[str, Any]) -> list[int]:
        body = msgspec.convert({"messages": [{"role": "user", "content": list(parts)}]}, ChatBody)
        return engine.chat_ids(body.messages, None)

    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Who speaks?"}, {"type": "audio"}]}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ids(audio, text, audio) == list(expected)
    assert ids(audio, text, audio).count(facts.audio_token_id) == 2
    assert ids(audio, faked).count(facts.audio_token_id) == 1
