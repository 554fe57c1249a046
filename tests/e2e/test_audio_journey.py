"""Speech and transcripts from real models: said, heard, and what a client gets when something breaks."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import jiwer
import numpy as np
import openai
import pytest

from fleet_cli.testing import RunningFleet, running_fleet, wait_for
from tests.support.audio_files import encoded, silent_video, tone, wav

pytestmark = pytest.mark.e2e
SPEAKING, HEARING = "hibari", "whisper-tiny.en"
RATE_HZ = 24_000

SENTENCES = (
    "The ship sailed across the bay at noon.",
    "My brother bought fresh bread and butter this morning.",
    "A small dog ran behind the old wooden fence.",
    "Please close the window before it starts to rain.",
    "The teacher wrote a long letter to her friends.",
    "They walked along the river until the sun went down.",
    "The capital of France is a beautiful city.",
    "We need more water for the flowers in the garden.",
    "The train to the north leaves in ten minutes.",
    "Nobody knew the answer to the last question.",
    "She plays the piano every evening after dinner.",
    "The children laughed at the funny story.",
    "He forgot his umbrella on the bus again.",
    "Winter nights are long and very cold here.",
    "The doctor told him to rest for a few days.",
    "Our neighbors painted their house last summer.",
    "I would like a cup of hot coffee, please.",
    "The book on the table belongs to my sister.",
    "Birds fly south when the weather gets cold.",
    "The new bridge is longer than the old one.",
)

FOUR = " ".join(SENTENCES[:4])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Audio is real; nobody chats."""
    settings = {
        "FLEET_VISION_ENGINE": "scripted",
        "FLEET_DECODE_ENGINE": "scripted",
        "FLEET_DECODE_ENGINE_ARGS": '{"hidden_size": 576, "image_tokens": 16}',
        "FLEET_TRANSCRIBE_MODEL": HEARING,
        "FLEET_SPEECH_MODEL": SPEAKING,
        "FLEET_SPEAK_REPLICAS": "2",
    }
    with running_fleet(tmp_path_factory.mktemp("audio_fleet"), settings, timeout_s=180.0) as fleet:
        wait_for(lambda: {SPEAKING, HEARING} <= served(fleet), 120.0, "the models that speak and hear")
        yield fleet


def served(fleet: RunningFleet) -> set[str]:
    """Models that can be asked for now."""
    cards = httpx.get(f"{fleet.url}/v1/models", timeout=10).json()["data"]
    return {card["id"] for card in cards if card["state"] == "ready"}


@pytest.fixture
def client(fleet: RunningFleet) -> openai.OpenAI:
    """The official client, unmodified."""
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)


def spoken(client: openai.OpenAI, text: str, response_format: Any = "wav", **fields: Any) -> bytes:
    answer = client.audio.speech.create(
        model=SPEAKING, voice="alloy", input=text, response_format=response_format, **fields
    )
    return bytes(answer.read())


def heard(client: openai.OpenAI, data: bytes, name: str = "speech.wav") -> str:
    return str(client.audio.transcriptions.create(model=HEARING, file=(name, data)).text)


def post_file(fleet: RunningFleet, data: bytes, **fields: str) -> httpx.Response:
    return httpx.post(
        f"{fleet.url}/v1/audio/transcriptions",
        data={"model": HEARING, **fields},
        files={"file": ("a.bin", data)},
        timeout=60,
    )


def words(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).strip()


def seconds_of(data: bytes) -> float:
    with av.open(io.BytesIO(data)) as container:
        return sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))


def test_what_is_said_is_heard_with_at_most_one_word_in_ten_wrong(client: openai.OpenAI) -> None:
    found = [words(heard(client, spoken(client, sentence))) for sentence in SENTENCES]

    error_ratio = jiwer.wer([words(sentence) for sentence in SENTENCES], found)

    print(f"word error rate over {len(SENTENCES)} sentences: {error_ratio:.3f}")
    assert error_ratio <= 0.10, found


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav"])
def test_every_format_holds_the_same_words(client: openai.OpenAI, name: str) -> None:
    data = spoken(client, SENTENCES[0], name)

    assert jiwer.wer(words(SENTENCES[0]), words(heard(client, data, f"speech.{name}"))) <= 0.15
    assert seconds_of(data) == pytest.approx(seconds_of(spoken(client, SENTENCES[0])), abs=0.2)


def test_speech_starts_before_half_of_it_is_made(client: openai.OpenAI) -> None:
    spoken(client, FOUR)
    started_s = time.perf_counter()
    with client.audio.speech.with_streaming_response.create(
        model=SPEAKING, voice="heart", input=FOUR * 3, response_format="pcm"
    ) as answer:
        pieces = answer.iter_bytes(1024)
        first = next(pieces)
        first_s = time.perf_counter() - started_s
        rest = b"".join(pieces)
    whole_s = time.perf_counter() - started_s

    assert len(first) + len(rest) > RATE_HZ * 2 * 10
    assert first_s < whole_s / 2


def test_faster_speech_is_shorter(client: openai.OpenAI) -> None:
    slow, fast = (len(spoken(client, SENTENCES[0], "pcm", speed=speed)) for speed in (0.5, 2.0))

    assert 3.0 < slow / fast < 5.0


def test_segments_words_and_streams(client: openai.OpenAI) -> None:
    data = spoken(client, f"{SENTENCES[0]} {SENTENCES[1]}")

    verbose = client.audio.transcriptions.create(
        model=HEARING,
        file=("a.wav", data),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    stream = client.audio.transcriptions.create(model=HEARING, file=("a.wav", data), stream=True)
    events = list(stream)

    duration_s = seconds_of(data)
    assert float(verbose.duration) == pytest.approx(duration_s, abs=0.01)
    assert verbose.segments and verbose.words
    assert all(0 <= part.start <= part.end <= duration_s + 0.01 for part in verbose.segments)
    assert [words(word.word) for word in verbose.words][:3] == ["the", "ship", "sailed"]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == verbose.text


def test_m21_silence_is_an_empty_transcript_and_an_empty_file_is_refused(fleet: RunningFleet) -> None:
    for data, seconds in ((wav(np.zeros(96_000, np.float32)), 6.0), (wav(np.zeros(0, np.float32)), 0.0)):
        answers = {
            name: post_file(fleet, data, response_format=name) for name in ("json", "verbose_json", "srt", "vtt")
        }
        assert {answer.status_code for answer in answers.values()} == {200}
        assert answers["json"].json()["text"] == ""
        verbose = answers["verbose_json"].json()
        assert (verbose["segments"], verbose["duration"]) == ([], seconds)
        assert (answers["srt"].text, answers["vtt"].text.strip()) == ("", "WEBVTT")
    _refused(post_file(fleet, b""), "invalid_audio")


def _refused(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (code, "file", "invalid_request_error")


def test_m23_stereo_of_48_khz_is_one_second(fleet: RunningFleet) -> None:
    left = tone(1.0, 48_000)
    data = wav(np.stack([left, np.zeros_like(left)], axis=1).reshape(-1), 48_000, channels=2)

    answer = post_file(fleet, data, response_format="verbose_json")

    assert answer.status_code == 200
    assert answer.json()["duration"] == pytest.approx(1.0, abs=0.001)
    report = httpx.get(f"{fleet.url}/v1/requests/{answer.headers['x-fleet-request-id']}", timeout=10).json()
    (media,) = report["media"]
    assert (media["kind"], media["sample_rate_hz"], media["num_channels"]) == ("audio", 48_000, 2)


def test_m25_a_recording_without_a_duration_is_as_long_as_it_is(fleet: RunningFleet) -> None:
    data = encoded(tone(1.0, 48_000), "webm", "libopus", 48_000, seekable=False)

    answer = post_file(fleet, data, response_format="verbose_json")

    assert answer.json()["duration"] == pytest.approx(1.0, abs=0.1)


def test_m27_a_video_without_sound_and_a_text_with_another_name_are_refused(fleet: RunningFleet) -> None:
    _refused(post_file(fleet, silent_video()), "no_audio_stream")
    _refused(post_file(fleet, b"I am a text.\n" * 100), "invalid_audio")


def test_s10_two_hours_in_a_small_file_are_refused_soon(fleet: RunningFleet) -> None:
    data = encoded(np.zeros(16_000 * 7200, np.float32), "flac", "flac")
    assert len(data) < 2 << 20

    _refused(post_file(fleet, data), "audio_too_long")


def test_a25_verbose_json_alone_has_segments(fleet: RunningFleet, client: openai.OpenAI) -> None:
    data = spoken(client, SENTENCES[3])

    alone = post_file(fleet, data, response_format="verbose_json").json()
    bad = post_file(fleet, data, **{"timestamp_granularities[]": "bad"})

    assert isinstance(alone["duration"], float)
    assert alone["segments"]
    assert post_file(fleet, data, **{"timestamp_granularities[]": "word"}).json()["words"]
    assert bad.json()["error"]["param"] == "timestamp_granularities"


def test_a30_a_refusal_names_the_field_and_what_there_is(client: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"response_format": "xyz"}, "response_format"),
        ({"voice": "nobody"}, "voice"),
        ({"input": ""}, "input"),
        ({"input": "a" * 5000}, "input"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.audio.speech.create(**{"model": SPEAKING, "voice": "alloy", "input": "hi", **fields})
        assert refused.value.param == param


def test_models_tell_what_they_take_and_give(client: openai.OpenAI) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}

    assert cards[SPEAKING]["output_modalities"] == ["audio"]
    assert "heart" in cards[SPEAKING]["voices"]
    assert (cards[HEARING]["input_modalities"], cards[HEARING]["output_modalities"]) == (["audio"], ["text"])


def test_a_speaker_killed_in_the_middle_costs_a_pause_and_no_sound_twice(
    fleet: RunningFleet, client: openai.OpenAI
) -> None:
    text = FOUR * 12
    whole = spoken(client, text, "pcm")
    speakers = [worker["pid"] for worker in fleet.wait_workers("audio_speak", 2)]
    with client.audio.speech.with_streaming_response.create(
        model=SPEAKING, voice="heart", input=text, response_format="pcm", timeout=60
    ) as answer:
        pieces = answer.iter_bytes(1024)
        first = next(pieces)
        # Whoever of the two does it.
        os.kill(_busy(fleet, speakers), signal.SIGKILL)
        rest = b"".join(pieces)

    assert first + rest == whole
    wait_for(lambda: len(fleet.wait_workers("audio_speak", 2)) == 2, 60.0, "the killed worker's successor")


def _busy(fleet: RunningFleet, pids: list[int]) -> int:
    """The process that computes right now."""
    ticks = {pid: _ticks(pid) for pid in pids}
    time.sleep(0.05)
    return max(pids, key=lambda pid: _ticks(pid) - ticks[pid])


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_many_speak_and_are_heard_at_once(client: openai.OpenAI) -> None:
    found: dict[int, str] = {}

    def one(number: int) -> None:
        found[number] = heard(client, spoken(client, SENTENCES[number]))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    rates = [jiwer.wer(words(SENTENCES[number]), words(found[number])) for number in range(6)]
    assert sum(rates) / len(rates) <= 0.15
