"""The models that hear and speak, as folders."""

import numpy as np
import pytest

from fleet_models import audio, prepare


def ignore(line):
    """Progress nobody reads."""


def test_voices_are_copied_out_of_their_package_once(tmp_path):
    lines = []

    folder = prepare("hibari", tmp_path, lines.append)
    again = prepare("hibari", tmp_path, lines.append)

    assert folder == again == tmp_path / "hibari"
    assert sorted(path.name for path in folder.iterdir()) == ["fleet_model.json", "heart.onnx"]
    assert len(lines) == 2


def test_a_package_that_is_missing_or_lacks_a_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(audio, "_HIBARI_VOICES", {"other.onnx": "other.onnx"})
    with pytest.raises(FileNotFoundError, match=r"hibari-tts has no other\.onnx"):
        prepare("hibari", tmp_path, ignore)
    monkeypatch.setattr(audio, "_HIBARI_PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match="no-such-package is not installed"):
        prepare("hibari", tmp_path, ignore)
    assert not (tmp_path / "hibari").exists()


@pytest.mark.models
def test_what_hibari_says_whisper_hears(model_cache):
    import soxr

    from fleet_audio.engine.hibari import HibariSpeaker
    from fleet_audio.engine.whisper import WhisperTranscriber
    from fleet_contracts.audio import TranscribeParams, TranscriptHead, TranscriptSegment

    speaker = HibariSpeaker(str(prepare("hibari", model_cache, ignore)), {})
    transcriber = WhisperTranscriber(str(prepare("whisper-tiny.en", model_cache, ignore)), {})
    voice = speaker.load().voices[0]
    transcriber.load()

    speech = speaker.synthesize("The ship sailed across the bay at noon.", voice, 1.0)
    samples = soxr.resample(speech, 24_000, 16_000).astype(np.float32)
    head, *segments = transcriber.transcribe(samples, TranscribeParams(word_timestamps=True))

    assert isinstance(head, TranscriptHead)
    assert head.duration_s == pytest.approx(len(speech) / 24_000, abs=0.01)
    assert all(isinstance(segment, TranscriptSegment) for segment in segments)
    assert "".join(segment.text for segment in segments).strip() == "The ship sailed across the bay at noon."
    assert [word.text.strip() for segment in segments for word in segment.words][:2] == ["The", "ship"]
    assert np.array_equal(speech, speaker.synthesize("The ship sailed across the bay at noon.", voice, 1.0))
    (silence,) = transcriber.transcribe(np.zeros(48_000, np.float32), TranscribeParams())
    assert silence == TranscriptHead(language="en", duration_s=3.0)
