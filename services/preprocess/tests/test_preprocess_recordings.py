"""Recordings in a chat: what is decoded, what is refused, and in which order it reaches the model."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleet_common.errors import ContextLengthError, FleetError, InvalidInputError, UnsupportedModalityError
from fleet_common.stage.port import Product, StepItem
from fleet_contracts.base import Modality
from fleet_contracts.preprocess import MediaItem, PreprocessParams, PreprocessResult
from fleet_preprocess.app import build_engine
from fleet_preprocess.core.audio import AudioLimits
from fleet_preprocess.core.audio_families import audio_family
from fleet_preprocess.core.families import ModelFiles
from fleet_preprocess.core.hashing import audio_hash
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.core.log_mel import MelSettings, log_mel
from fleet_preprocess.core.qwen_audio import QwenAudio
from fleet_preprocess.engine.scripted import AUDIO_ID, IMAGE_ID, ScriptedPromptEngine
from fleet_preprocess.settings import PreprocessSettings
from fleet_preprocess.worker import PreprocessEngine
from tests.support.audio_files import encoded, silent_video, tone, wav

MakeItem = Callable[[Any, PreprocessParams], StepItem]
PARAM = "messages[0].content[0].input_audio"
QWEN = QwenAudio(MelSettings())


def audio_part(data: bytes | str, kind: str = "wav") -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}


def image_part() -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def prepare(
    make_item: MakeItem, *parts: dict[str, Any], limits: MediaLimits | None = None, **engine_args: Any
) -> Any:
    engine = PreprocessEngine("m", ScriptedPromptEngine({"takes_audio": True, **engine_args}), limits or MediaLimits())
    await engine.start()
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    (made,) = await engine.run([make_item(body, PreprocessParams())])
    await engine.close()
    return made


def only_medium(made: Product | FleetError) -> MediaItem:
    assert isinstance(made, Product), made
    assert isinstance(made.result, PreprocessResult)
    (item,) = made.result.media
    return item


async def test_m23_stereo_of_48_khz_reaches_the_model_as_one_second(cases_dir: Path, make_item: MakeItem) -> None:
    made = await prepare(make_item, audio_part((cases_dir / "m23_48k_stereo_left.wav").read_bytes()))

    item = only_medium(made)
    assert abs(item.duration_s * 16_000 - 16_000) <= 1
    assert (item.kind, item.sample_rate_hz, item.num_channels, item.part) == ("audio", 48_000, 2, PARAM)
    assert (item.num_tokens, item.grid) == (25, (50, 1, 1))
    assert (made.tensors["audio0"].shape, made.tensors["audio0"].dtype) == ((128, 3000), np.float32)


async def test_media_are_numbered_in_the_order_of_their_parts(make_item: MakeItem) -> None:
    made = await prepare(make_item, audio_part(wav(tone(1.0))), image_part(), audio_part(wav(tone(2.0))))

    assert isinstance(made, Product)
    assert set(made.tensors) == {"prompt", "audio0", "pixels1", "audio2"}
    prompt = made.tensors["prompt"].tolist()
    assert [token_id for token_id in prompt if token_id in (AUDIO_ID, IMAGE_ID)] == [AUDIO_ID, IMAGE_ID, AUDIO_ID]
    assert isinstance(made.result, PreprocessResult)
    assert [(item.kind, item.num_tokens) for item in made.result.media] == [("audio", 25), ("image", 16), ("audio", 50)]
    assert made.result.num_prompt_tokens == len(prompt) - 3 + 25 + 16 + 50
    assert len({made.hashes[name] for name in ("audio0", "pixels1", "audio2")}) == 3


async def test_m21_silence_and_m25_files_without_a_duration_are_heard(make_item: MakeItem) -> None:
    silence = await prepare(make_item, audio_part(wav(np.zeros(16_000, np.float32))))
    webm = encoded(tone(1.0, 48_000), "webm", "libopus", 48_000, seekable=False)
    recorded = await prepare(make_item, audio_part(webm))

    assert np.ptp(silence.tensors["audio0"]) == 0.0
    assert only_medium(recorded).duration_s == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        ("no base64!", "invalid_audio", f"{PARAM}.data"),
        ("data:audio/wav;base64,AAAA", "invalid_audio", f"{PARAM}.data"),
        (b"This is a text file.\n" * 40, "invalid_audio", PARAM),
        (silent_video(), "no_audio_stream", PARAM),
        (wav(np.zeros(0, np.float32)), "audio_too_short", PARAM),
        (wav(tone(0.02)), "audio_too_short", PARAM),
        (wav(tone(30.1)), "audio_too_long", PARAM),
    ],
    ids=["base64", "data URL", "text", "m27 no sound", "m21 no samples", "a click", "above the window"],
)
async def test_what_the_model_cannot_hear_is_refused_by_name(
    data: bytes | str, code: str, param: str, make_item: MakeItem
) -> None:
    refused = await prepare(make_item, audio_part(data))

    assert isinstance(refused, InvalidInputError)
    assert (refused.code, refused.param) == (code, param)


async def test_the_caps_of_the_settings_hold_too(make_item: MakeItem) -> None:
    second = audio_part(wav(tone(1.0)))
    long = await prepare(make_item, second, limits=MediaLimits(audio=AudioLimits(max_s=0.5)))
    large = await prepare(make_item, second, limits=MediaLimits(audio=AudioLimits(max_bytes=1000)))
    many = await prepare(make_item, second, second, limits=MediaLimits(max_audios=1))
    full = await prepare(make_item, second, context_tokens=40)

    assert [made.code for made in (long, large)] == ["audio_too_long", "audio_too_large"]
    assert isinstance(many, ContextLengthError)
    assert "(25 of them from media)" in str(full)


async def test_a_model_that_does_not_hear_says_so(make_item: MakeItem) -> None:
    refused = await prepare(make_item, audio_part(wav(tone(1.0))), takes_audio=False)

    assert isinstance(refused, UnsupportedModalityError)
    assert refused.param == PARAM


async def test_the_card_tells_what_is_heard() -> None:
    named = {"pool": "p", "model": "m", "engine": "scripted", "max_audios": 3}
    engine = build_engine(PreprocessSettings(**named, engine_args={"takes_audio": True, "image_tokens": 0}))

    (card,) = await engine.start()

    assert (card.input_modalities, card.max_audios) == ((Modality.TEXT, Modality.AUDIO), 3)
    await engine.close()


@pytest.mark.parametrize(
    ("num_samples", "num_tokens"),
    [(0, 0), (320, 0), (321, 1), (1_120, 2), (16_000, 25), (16_001, 25), (480_000, 750), (490_000, 750)],
)
def test_a_token_is_40_ms(num_samples: int, num_tokens: int) -> None:
    assert num_tokens == QWEN.num_tokens(num_samples)


def test_a_recording_is_identified_by_all_of_it() -> None:
    samples = np.linspace(-1, 1, 500, dtype=np.float32)
    other = samples.copy()
    other[499] += 1e-7

    def key(values: np.ndarray, revision: str = "r", **settings: Any) -> str:
        return audio_hash(values, settings=settings, revision=revision)

    keys = {
        key(samples),
        key(other),
        key(samples[:-1]),
        key(np.append(samples, np.float32(0))),
        key(samples, revision="s"),
        key(samples, num_bins=80),
    }
    assert len(keys) == 6
    assert {len(one) for one in keys} == {64}
    assert key(samples) == key(samples.copy())


def test_features_follow_the_loudness_of_a_note() -> None:
    features = log_mel(tone(1.0, hertz=1_000.0), MelSettings())

    assert (features.shape, features.dtype) == ((128, 3000), np.float32)
    assert 30 <= int(features[:, 50].argmax()) <= 50
    assert np.ptp(features[:, 110:]) == 0.0
    assert features.max() - features.min() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("config", "processor", "why"),
    [
        ({"model_type": "ultravox"}, {}, "ultravox"),
        ({}, {"feature_extractor_type": "ParakeetFeatureExtractor"}, "Parakeet"),
        ({}, {"feature_size": 80}, "80 x 3000"),
        ({"audio_config": {"max_source_positions": 750}}, {"feature_size": 128}, "128 x 1500"),
        ({}, {"feature_size": 128, "dither": 0.1}, "dither"),
    ],
)
def test_models_that_are_not_followed_are_refused_at_the_start(
    config: dict[str, Any], processor: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        audio_family(ModelFiles({"model_type": "qwen2_audio", "audio_config": {}, **config}, processor))


async def test_a_part_without_data_is_refused(make_item: MakeItem) -> None:
    for part in ({"type": "input_audio"}, {"type": "input_audio", "input_audio": {}}):
        refused = await prepare(make_item, part)
        assert isinstance(refused, InvalidInputError), json.dumps(part)
        assert refused.param == PARAM
