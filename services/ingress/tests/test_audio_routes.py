"""`/v1/audio/*` over scripted workers: what is refused, what is sent, and in which format."""

from __future__ import annotations

import asyncio
import io
import wave
from collections.abc import Mapping
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from fleet_common.bus.memory_work import WorkLimits
from fleet_contracts import codec
from fleet_contracts.audio import (
    TRANSCRIPT_MEDIA_TYPE,
    SpeakParams,
    TranscribeParams,
    TranscriptHead,
    TranscriptPart,
    TranscriptSegment,
    TranscriptWord,
    pcm_media_type,
)
from fleet_contracts.base import Stage
from fleet_contracts.events import Chunk, Failure, RequestEvent
from fleet_ingress.testing import (
    SPEECH_MODEL,
    TEXT_MODEL,
    VOICE_MODEL,
    FaultError,
    IngressRig,
    Script,
    eventually,
    open_rig,
)

RATE_HZ = 24_000
MAGIC = {"mp3": (b"\xff\xf3", b"\xff\xfb", b"ID3"), "opus": (b"OggS",), "flac": (b"fLaC",), "wav": (b"RIFF",)}
MAGIC["aac"] = (b"\xff\xf1", b"\xff\xf9")
TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def sentence(seconds: float = 0.5, hertz: float = 300.0) -> bytes:
    times = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    return (16_000 * np.sin(2 * np.pi * hertz * times)).astype("<i2").tobytes()


SPOKEN = (sentence(1.5, 200.0), sentence(0.5, 400.0), sentence(0.25, 600.0))


def speech(*parts: bytes, **fields: Any) -> Script:
    return Script(media=[(pcm_media_type(RATE_HZ), part) for part in parts or SPOKEN], **fields)


def transcript(*parts: TranscriptPart, **fields: Any) -> Script:
    return Script(media=[(TRANSCRIPT_MEDIA_TYPE, codec.encode(part)) for part in parts], **fields)


HEARD: tuple[TranscriptPart, ...] = (
    TranscriptHead(language="en", duration_s=3.5),
    TranscriptSegment(
        text=" Hello there.",
        start_s=0.0,
        end_s=1.25,
        token_ids=(1, 2),
        words=(TranscriptWord(text=" Hello", start_s=0.0, end_s=0.5),),
    ),
    TranscriptSegment(text=" Good --> bye.", start_s=1.25, end_s=3.4),
)


def scripted(body: Mapping[str, object]) -> Script:
    return transcript(*HEARD) if "file" in body and len(body["file"]) == 4 else speech()  # type: ignore[arg-type]


async def spoken(rig: IngressRig, **fields: Any) -> httpx.Response:
    body = {"model": VOICE_MODEL, "input": "One. Two.", "voice": "alloy", **fields}
    async with httpx.AsyncClient(base_url=rig.url) as client:
        return await client.post("/v1/audio/speech", json=body)


async def transcribed(rig: IngressRig, data: bytes = b"RIFF", **fields: Any) -> httpx.Response:
    form = {"model": SPEECH_MODEL, **fields}
    async with httpx.AsyncClient(base_url=rig.url) as client:
        return await client.post("/v1/audio/transcriptions", data=form, files={"file": ("a.wav", data)})


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


def decoded(data: bytes) -> tuple[float, int]:
    """Seconds and sample rate of a file, by its data."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(audio=0))
    return sum(frame.samples / frame.sample_rate for frame in frames), frames[0].sample_rate


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav"])
async def test_speech_is_what_its_content_type_says_and_as_long_as_was_said(name: str) -> None:
    async with open_rig(scripted) as rig:
        answer = await spoken(rig, response_format=name)

    assert (answer.status_code, answer.headers["content-type"]) == (200, TYPES[name])
    assert answer.content.startswith(MAGIC[name])
    seconds, _ = decoded(answer.content)
    assert seconds == pytest.approx(2.25, abs=0.1)


async def test_pcm_is_what_the_worker_said_and_mp3_is_the_default() -> None:
    async with open_rig(scripted) as rig:
        pcm = await spoken(rig, response_format="pcm")
        default = await spoken(rig)

    assert (pcm.headers["content-type"], pcm.content) == ("audio/pcm", b"".join(SPOKEN))
    assert default.headers["content-type"] == "audio/mpeg"


async def test_a_wav_of_one_sentence_tells_its_length_and_a_longer_one_is_open_ended() -> None:
    async def slowly(index: int) -> None:
        await asyncio.sleep(0.05)

    def script(body: Mapping[str, object]) -> Script:
        return speech(SPOKEN[1]) if body == {"file": b"Short."} else speech(before_token=slowly)

    async with open_rig(script) as rig:
        short = await spoken(rig, response_format="wav", input="Short.")
        long = await spoken(rig, response_format="wav")

    with wave.open(io.BytesIO(short.content)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (12_000, RATE_HZ, 1)
    assert int.from_bytes(short.content[4:8], "little") == len(short.content) - 8
    assert long.content[40:44] == b"\xff\xff\xff\xff"
    assert long.content[44:] == b"".join(SPOKEN)


async def test_the_plan_is_one_step_that_gets_the_text_as_its_root() -> None:
    async with open_rig(scripted) as rig:
        await spoken(rig, voice="heart", speed=1.5, response_format="opus")

    (task,) = rig.fleet.tasks
    assert [step.stage for step in task.plan.steps] == [Stage.AUDIO_SPEAK]
    assert task.step.params == SpeakParams(voice="heart", speed=1.5, format="opus")
    assert rig.fleet.bodies == [{"file": b"One. Two."}]


async def test_speech_is_sent_while_the_rest_is_still_made() -> None:
    gate = asyncio.Event()

    async def before(index: int) -> None:
        if index == 1:
            await gate.wait()

    async with open_rig(lambda body: speech(before_token=before)) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none")
        async with client.audio.speech.with_streaming_response.create(
            model=VOICE_MODEL, input="One. Two.", voice="alloy", response_format="pcm"
        ) as answer:
            pieces = answer.iter_bytes(4096)
            first = await anext(pieces)
            is_early = not gate.is_set()
            gate.set()
            rest = b"".join([piece async for piece in pieces])

    assert is_early
    assert first + rest == b"".join(SPOKEN)


async def test_a_worker_that_dies_in_the_middle_is_continued_without_a_sound_twice() -> None:
    deaths = iter([True])

    async def before(index: int) -> None:
        if index == 2 and next(deaths, False):
            raise FaultError

    async with open_rig(lambda body: speech(before_token=before), WorkLimits(ack_wait_s=0.2)) as rig:
        answer = await spoken(rig, response_format="pcm")

    assert answer.content == b"".join(SPOKEN)


async def test_a_lost_piece_is_asked_for_again() -> None:
    lost: list[RequestEvent] = []

    def lose(event: RequestEvent) -> bool:
        is_lost = isinstance(event, Chunk) and (event.index, event.piece) == (0, 1) and not lost
        if is_lost:
            lost.append(event)
        return is_lost

    async with open_rig(scripted) as rig:
        rig.fleet.lose = lose
        answer = await spoken(rig, response_format="pcm")

    assert (len(lost), answer.content) == (1, b"".join(SPOKEN))


async def test_speech_that_fails_in_the_middle_does_not_look_whole() -> None:
    failure = Failure(error_type="server_error", code="engine_error", message="x", status=500)

    async def slowly(index: int) -> None:
        await asyncio.sleep(0.05)

    async with open_rig(lambda body: speech(before_token=slowly, fail=failure, fail_at=1)) as rig:
        with pytest.raises(httpx.RemoteProtocolError):
            await spoken(rig, response_format="pcm")
        with pytest.raises(httpx.RemoteProtocolError):
            async with httpx.AsyncClient(base_url=rig.url, headers={"Idempotency-Key": "k"}) as client:
                await client.post("/v1/audio/speech", json={"model": VOICE_MODEL, "input": "a", "voice": "alloy"})


async def test_speech_that_fails_before_the_first_sound_is_an_error() -> None:
    failure = Failure(error_type="server_error", code="engine_error", message="x", status=500)

    async with open_rig(lambda body: speech(fail=failure)) as rig:
        assert error(await spoken(rig), 500)["code"] == "engine_error"


async def test_a_listener_who_leaves_stops_the_work() -> None:
    async def before(index: int) -> None:
        await asyncio.sleep(0.05)

    async with open_rig(lambda body: speech(*SPOKEN * 20, before_token=before)) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none")
        async with client.audio.speech.with_streaming_response.create(
            model=VOICE_MODEL, input="One.", voice="alloy", response_format="pcm"
        ) as answer:
            await anext(answer.iter_bytes(1024))
        await eventually(lambda: len(rig.fleet.cancelled) == 1)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "xyz"}, "response_format", "mp3, opus, aac, flac, wav, pcm"),
        ({"voice": "nobody"}, "voice", "heart, alloy"),
        ({"input": ""}, "input", "empty"),
        ({"input": " \n"}, "input", "empty"),
        ({"input": 7}, "input", ""),
        ({"speed": 9}, "speed", "4.0"),
        ({"speed": "fast"}, "speed", ""),
        ({"stream_format": "sse"}, "stream_format", "audio"),
        ({"instructions": "sad"}, "instructions", ""),
        ({"model": TEXT_MODEL}, "model", "speak"),
        ({"model": SPEECH_MODEL}, "model", "speak"),
    ],
)
async def test_a_bad_request_to_speak_names_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    async with open_rig(scripted) as rig:
        found = error(await spoken(rig, **fields))

    assert found["param"] == param
    assert words in found["message"]
    assert rig.fleet.tasks == []


async def test_models_tell_what_they_take_and_give() -> None:
    async with open_rig(scripted) as rig, httpx.AsyncClient(base_url=rig.url) as client:
        models = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        chat = await client.post("/v1/chat/completions", json={"model": VOICE_MODEL, "messages": []})
        ready = await client.get("/health/ready")
        await rig.fleet.unregister(Stage.AUDIO_SPEAK)
        await eventually(lambda: bool(rig.ingress.view.catalog.missing()))
        missing = await client.get("/health/ready")
        nobody = await spoken(rig)

    assert (models[SPEECH_MODEL]["input_modalities"], models[SPEECH_MODEL]["output_modalities"]) == (
        ["audio"],
        ["text"],
    )
    assert (models[VOICE_MODEL]["output_modalities"], models[VOICE_MODEL]["voices"]) == (["audio"], ["heart", "alloy"])
    assert chat.status_code == 400
    assert (ready.status_code, missing.status_code) == (200, 503)
    assert "audio_speak of tts" in missing.json()["error"]["message"]
    assert error(nobody, 503)["code"] == "stage_unavailable"


async def test_a_transcript_comes_in_every_format() -> None:
    async with open_rig(scripted) as rig:
        answers = {
            name: await transcribed(rig, response_format=name)
            for name in ("json", "text", "srt", "vtt", "verbose_json")
        }

    assert answers["json"].json() == {"text": "Hello there. Good --> bye.", "usage": {"type": "duration", "seconds": 4}}
    assert answers["text"].text == "Hello there. Good --> bye.\n"
    assert answers["srt"].text.startswith("1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n2\n00:00:01,250 -->")
    assert answers["vtt"].text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello there.\n\n00:00:01.250 -->")
    assert answers["vtt"].text.count("-->") == 2
    assert answers["vtt"].headers["content-type"].startswith("text/vtt")
    verbose = answers["verbose_json"].json()
    assert (verbose["duration"], verbose["language"], len(verbose["segments"])) == (3.5, "en", 2)
    assert (verbose["segments"][0]["start"], verbose["segments"][0]["end"]) == (0.0, 1.25)
    assert "words" not in verbose


async def test_nothing_heard_is_an_empty_transcript() -> None:
    async with open_rig(lambda body: transcript(TranscriptHead(language="en", duration_s=6.0))) as rig:
        answers = {
            name: await transcribed(rig, response_format=name) for name in ("json", "srt", "vtt", "verbose_json")
        }

    assert answers["json"].json()["text"] == ""
    assert (answers["srt"].text, answers["vtt"].text) == ("", "WEBVTT\n")
    verbose = answers["verbose_json"].json()
    assert (verbose["duration"], verbose["segments"], verbose["text"]) == (6.0, [], "")


@pytest.mark.parametrize("name", ["timestamp_granularities[]", "timestamp_granularities"])
async def test_words_are_told_when_asked_for(name: str) -> None:
    async with open_rig(scripted) as rig:
        both = await transcribed(rig, response_format="verbose_json", **{name: ["word", "segment"]})
        words = await transcribed(rig, **{name: "word"})
        bad = await transcribed(rig, response_format="verbose_json", **{name: "bad"})
        other = await transcribed(rig, response_format="srt", **{name: "word"})

    assert both.json()["words"] == [{"word": "Hello", "start": 0.0, "end": 0.5}]
    assert len(both.json()["segments"]) == 2
    assert "segments" not in words.json()
    assert rig.fleet.tasks[0].plan.steps[1].params == TranscribeParams(word_timestamps=True)
    assert error(bad)["param"] == error(other)["param"] == "timestamp_granularities"


async def test_the_official_client_transcribes_whole_and_streamed() -> None:
    async with open_rig(scripted) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none")
        whole = await client.audio.transcriptions.create(
            model=SPEECH_MODEL, file=("a.wav", b"RIFF"), language="en", prompt="So:", temperature=0.2
        )
        verbose = await client.audio.transcriptions.create(
            model=SPEECH_MODEL,
            file=("a.wav", b"RIFF"),
            response_format="verbose_json",
            timestamp_granularities=["segment", "word"],
        )
        stream = await client.audio.transcriptions.create(model=SPEECH_MODEL, file=("a.wav", b"RIFF"), stream=True)
        events = [event async for event in stream]

    assert whole.text == "Hello there. Good --> bye."
    assert (len(verbose.segments or ()), len(verbose.words or ())) == (2, 1)
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert events[-1].text == "".join(event.delta for event in events[:-1]) == "Hello there. Good --> bye."
    first = rig.fleet.tasks[0]
    assert first.plan.steps[1].params == TranscribeParams(language="en", prompt="So:", temperature=0.2)
    assert [step.stage for step in first.plan.steps] == [Stage.PREPROCESS, Stage.AUDIO_TRANSCRIBE]
    assert rig.fleet.bodies[0] == {"file": b"RIFF"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"language": "fr"}, "language"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "7"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"model": VOICE_MODEL}, "model"),
        ({"model": TEXT_MODEL}, "model"),
        ({"model": ""}, "model"),
        ({"diarize": "true"}, "diarize"),
        ({"priority": "now"}, "priority"),
    ],
)
async def test_a_bad_form_names_the_field(fields: dict[str, str], param: str) -> None:
    async with open_rig(scripted) as rig:
        found = error(await transcribed(rig, **fields))

    assert found["param"] == param
    assert rig.fleet.tasks == []


async def test_a_form_that_is_none_is_refused() -> None:
    async with open_rig(scripted) as rig, httpx.AsyncClient(base_url=f"{rig.url}/v1/audio") as client:
        empty = await transcribed(rig, b"")
        plain = await client.post("/transcriptions", json={"model": SPEECH_MODEL})
        no_file = await client.post("/transcriptions", files={"model": (None, SPEECH_MODEL)})
        text_file = await client.post("/transcriptions", files={"model": (None, SPEECH_MODEL), "file": (None, "abc")})
        broken = await client.post(
            "/transcriptions", content=b"--x\r\nnonsense", headers={"Content-Type": "multipart/form-data; boundary=x"}
        )
        no_boundary = await client.post(
            "/transcriptions", content=b"abc", headers={"Content-Type": "multipart/form-data"}
        )
        translations = await client.post("/translations", files={"file": ("a.wav", b"RIFF")})

    assert (error(empty)["param"], error(empty)["code"]) == ("file", "invalid_audio")
    assert error(plain, 415)["code"] == "unsupported_media_type"
    assert error(no_file)["param"] == error(text_file)["param"] == "file"
    assert error(broken)["code"] == error(no_boundary)["code"] == "invalid_form"
    assert error(translations, 404)["code"] == "unknown_url"


async def test_forms_of_one_key_are_one_request_whatever_their_boundary() -> None:
    async with (
        open_rig(scripted) as rig,
        httpx.AsyncClient(base_url=rig.url, headers={"Idempotency-Key": "k"}) as client,
    ):

        async def post(data: bytes) -> httpx.Response:
            files = {"file": ("a.wav", data)}
            return await client.post("/v1/audio/transcriptions", data={"model": SPEECH_MODEL}, files=files)

        first, again, other = await post(b"RIFF"), await post(b"RIFF"), await post(b"RIFX")

    assert first.json() == again.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert error(other)["code"] == "idempotency_key_reused"
    assert len(rig.fleet.tasks) == 1


async def test_a_lone_surrogate_in_the_text_is_invalid_unicode() -> None:
    body = b'{"model": "tts", "voice": "alloy", "input": "\\ud800"}'
    async with open_rig(scripted) as rig, httpx.AsyncClient(base_url=rig.url) as client:
        answer = await client.post("/v1/audio/speech", content=body, headers={"Content-Type": "application/json"})

    assert error(answer)["code"] == "invalid_unicode"
