"""Files of strangers: what is decoded, what is refused, and that headers are not believed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fleet_common.errors import ContractError, InvalidInputError
from fleet_common.stage.port import Product, StepItem
from fleet_common.testing.steps import first_attempt
from fleet_contracts.audio import TranscribeParams
from fleet_contracts.base import Modality, Stage, StepId
from fleet_contracts.preprocess import PreprocessParams, PreprocessResult
from fleet_contracts.work import PlanStep
from fleet_preprocess.app import build_engine
from fleet_preprocess.audio_worker import AudioPreprocessEngine
from fleet_preprocess.core.audio import AudioLimits, DecodedAudio, decode_audio
from fleet_preprocess.settings import PreprocessSettings
from tests.support.audio_files import encoded, silent_video, tone, wav


def decoded(data: bytes, **limits: float) -> DecodedAudio:
    return decode_audio(data, AudioLimits(**limits), 16_000, param="file")  # type: ignore[arg-type]


def refusal(data: bytes, **limits: float) -> str:
    with pytest.raises(InvalidInputError) as refused:
        decoded(data, **limits)
    assert refused.value.param == "file"
    return refused.value.code


def patched(data: bytes, at: int, value: int, num_bytes: int) -> bytes:
    return data[:at] + value.to_bytes(num_bytes, "little") + data[at + num_bytes :]


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp3", "libmp3lame"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("wav", "pcm_u8"),
        ("wav", "pcm_s24le"),
        ("wav", "pcm_f32le"),
        ("aiff", "pcm_s16be"),
    ],
)
def test_formats_of_clients_become_mono_at_16_khz(container: str, codec: str) -> None:
    audio = decoded(encoded(tone(1.0, 48_000), container, codec, 48_000))

    assert audio.samples.dtype == np.float32
    assert abs(audio.samples.shape[0] - 16_000) <= 1
    assert (audio.sample_rate_hz, audio.num_channels) == (48_000, 1)
    loudness = float(np.sqrt(np.mean(audio.samples**2)))
    assert loudness == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_m23_stereo_is_mixed_down_and_not_taken_for_more_time() -> None:
    left = tone(1.0, 48_000)
    audio = decoded(wav(np.stack([left, np.zeros_like(left)], axis=1).reshape(-1), 48_000, channels=2))

    assert abs(audio.samples.shape[0] - 16_000) <= 1
    assert (audio.sample_rate_hz, audio.num_channels) == (48_000, 2)
    assert float(np.abs(audio.samples).max()) == pytest.approx(0.25, rel=0.05)


def test_m25_a_recording_without_a_duration_is_as_long_as_its_samples() -> None:
    data = encoded(tone(1.0, 48_000), "webm", "libopus", 48_000, seekable=False)

    assert decoded(data).samples.shape[0] / 16_000 == pytest.approx(1.0, abs=0.1)


def test_m27_a_video_without_sound_is_refused() -> None:
    assert refusal(silent_video()) == "no_audio_stream"


def test_m21_no_bytes_are_no_audio_and_no_samples_are_silence() -> None:
    assert refusal(b"") == "invalid_audio"
    assert decoded(wav(np.zeros(0, np.float32))).samples.shape == (0,)


@pytest.mark.parametrize(
    "data",
    [
        b"This is a text file, whatever its name says.\n" * 40,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n/etc/hostname\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        patched(wav(tone(0.1)), 24, 0, 4),
        patched(wav(tone(0.1)), 22, 0, 2),
    ],
    ids=["text", "playlist", "concat", "rate 0", "channels 0"],
)
def test_what_is_no_audio_is_refused(data: bytes) -> None:
    assert refusal(data) == "invalid_audio"


def test_a_header_that_claims_too_much_or_too_little_is_not_believed() -> None:
    honest = wav(tone(1.0))

    # Its data chunk claims 2 GiB, which is far beyond the limit: only what is there counts.
    assert decoded(patched(honest, 40, 2**31, 4)).samples.shape[0] == 16_000
    assert refusal(encoded(np.zeros(16_000 * 3, np.float32), "flac", "flac", seekable=False), max_s=2.0) == (
        "audio_too_long"
    )


def test_s10_hours_of_silence_are_refused_for_their_length() -> None:
    assert refusal(encoded(np.zeros(16_000 * 600, np.float32), "flac", "flac"), max_s=60.0) == "audio_too_long"
    assert refusal(wav(tone(0.1)), max_bytes=100) == "audio_too_large"


def test_what_is_left_of_a_cut_file_is_heard() -> None:
    whole = encoded(tone(4.0), "flac", "flac")

    assert 0.5 < decoded(whole[: len(whole) // 2]).samples.shape[0] / 16_000 < 4.0


def step(data: bytes, route: str = "audio") -> StepItem:
    pre = PlanStep(step_id=StepId("pre"), stage=Stage.PREPROCESS, model="asr", params=PreprocessParams(route=route))
    hear = PlanStep(
        step_id=StepId("hear"),
        stage=Stage.AUDIO_TRANSCRIBE,
        model="asr",
        params=TranscribeParams(),
        needs=(StepId("pre"),),
    )
    return first_attempt(pre, hear, root=data)


async def test_one_bad_file_does_not_spoil_the_others() -> None:
    engine = AudioPreprocessEngine("asr", AudioLimits(), max_batch=4)
    (card,) = await engine.start()

    good, bad, foreign = await engine.run([step(wav(tone(1.0))), step(b"no"), step(b"{}", route="chat")])
    await engine.close()

    assert isinstance(good, Product)
    assert good.tensors["audio0"].shape == (16_000,)
    assert isinstance(good.result, PreprocessResult)
    (media,) = good.result.media
    assert (media.kind, media.duration_s, media.sample_rate_hz, media.num_channels) == ("audio", 1.0, 16_000, 1)
    assert good.hashes["audio0"] == media.sha256
    assert isinstance(bad, InvalidInputError)
    assert isinstance(foreign, ContractError)
    assert card.input_modalities == (Modality.AUDIO,)


def test_the_kind_of_worker_is_a_setting() -> None:
    settings = PreprocessSettings(pool="p", model="asr", kind="audio", max_audio_s=1.0)

    engine = build_engine(settings)

    assert isinstance(engine, AudioPreprocessEngine)
    result = asyncio.run(engine.run([step(wav(tone(2.0)))]))
    assert isinstance(result[0], InvalidInputError)
    assert result[0].code == "audio_too_long"
