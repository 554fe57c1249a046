"""The decode step over the scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet_common.errors import (
    CancelledWorkError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidInputError,
)
from fleet_contracts.base import Modality
from fleet_contracts.decode import DecodeParams
from fleet_contracts.events import ChoiceProgress, Usage
from fleet_contracts.preprocess import MediaItem, PreprocessResult
from fleet_decode.core.continuation import StreamDivergedError
from fleet_decode.engine.scripted import ScriptedEngine
from fleet_decode.testing import RecordingSink, step_item
from fleet_decode.worker import DecodeEngine


async def decoder(**engine_args: Any) -> DecodeEngine:
    engine = DecodeEngine(ScriptedEngine(engine_args), model="m", slots=64, max_images=4)
    await engine.start()
    return engine


async def decoded(params: DecodeParams, prompt: tuple[int, ...] = (1, 2, 3), **engine_args: Any) -> RecordingSink:
    sink = RecordingSink()
    await (await decoder(**engine_args)).run(step_item(prompt, params), sink)
    return sink


async def test_a_stop_string_over_token_borders_ends_the_stream_unseen() -> None:
    sink = await decoded(DecodeParams(stop=("STOP",)), pieces=["ab", "STO", "P", "cd"])

    assert sink.text() == "ab"
    assert sink.finish() == ("stop", "STOP")
    assert not any("STO" in event.text for event in sink.events)
    assert sink.ids() == [0, 1, 2]


async def test_a_stop_string_cuts_a_step_of_several_tokens() -> None:
    sink = await decoded(DecodeParams(stop=("STOP",)), pieces=["ab", "STO", "P", "cd"], tokens_per_step=4)

    assert (sink.text(), sink.ids()) == ("ab", [0, 1, 2])


async def test_a_character_split_over_tokens_is_never_shown_broken() -> None:
    sink = await decoded(DecodeParams(), pieces_hex=["f09f", "9880", "206f6b"])

    assert [event.text for event in sink.events] == ["", "😀", " ok", ""]
    assert sink.finish() == ("stop", None)


async def test_length_is_the_reason_when_max_tokens_is_reached() -> None:
    sink = await decoded(DecodeParams(max_tokens=3), pieces=list("abcdef"))

    assert (sink.text(), sink.finish(), len(sink.ids())) == ("abc", ("length", None), 3)


async def test_zero_max_tokens_is_what_the_context_leaves() -> None:
    sink = await decoded(DecodeParams(max_tokens=0, ignore_eos=True), (1, 2, 3), context_tokens=10)

    assert (len(sink.ids()), sink.finish()) == (7, ("length", None))


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    engine = await decoder(context_tokens=3)

    with pytest.raises(ContextLengthError):
        await engine.run(step_item((1, 2, 3), DecodeParams()), RecordingSink())


async def test_a_stop_token_ends_the_choice_and_has_no_text() -> None:
    sink = await decoded(DecodeParams(stop_token_ids=(2,)), pieces=list("abcd"))

    assert (sink.text(), sink.ids(), sink.finish()) == ("ab", [0, 1, 2], ("stop", "2"))


async def test_choices_are_generated_side_by_side_and_counted_together() -> None:
    sink = RecordingSink()
    engine = await decoder()

    usage = await engine.run(step_item((5, 6), DecodeParams(n=3, max_tokens=4, seed=7)), sink)

    assert usage == Usage(prompt_tokens=2, completion_tokens=12)
    assert len({sink.text(choice) for choice in range(3)}) == 3
    assert [event.choice for event in sink.events[:3]] == [0, 1, 2]
    assert engine.running() == 0


async def test_pictures_count_in_usage_and_context_as_the_model_sees_them() -> None:
    sink = RecordingSink()
    engine = await decoder(hidden_size=4, context_tokens=30)
    images = [np.zeros((8, 4), dtype=np.float32)] * 2

    usage = await engine.run(step_item((5, 9, 9), DecodeParams(ignore_eos=True), images, num_prompt_tokens=17), sink)

    assert usage == Usage(prompt_tokens=1 + 2 * 8, completion_tokens=30 - 17)


async def test_the_answer_depends_on_prompt_and_image_alone() -> None:
    params = DecodeParams(max_tokens=6, temperature=0.0)

    first, again, other = [await decoded(params, prompt) for prompt in ((1, 2), (1, 2), (1, 3))]

    assert first.text() == again.text() != other.text()


async def test_logprobs_name_every_token_with_its_bytes() -> None:
    sink = await decoded(DecodeParams(logprobs=2, max_tokens=2), pieces_hex=["f09f", "9880"])

    first = sink.events[0].logprobs[0]
    assert [len(event.logprobs) for event in sink.events] == [1, 1]
    assert (first.chosen.token_id, first.chosen.bytes_, first.chosen.token) == (0, b"\xf0\x9f", "\ufffd")
    assert [candidate.token_id for candidate in first.top] == [0, 1]


async def test_echoed_prompt_text_comes_first_and_is_no_place_for_stop_strings() -> None:
    sink = await decoded(DecodeParams(echo_prompt_text="STOP: ", stop=("STOP",)), pieces=["a", "b"])

    assert sink.text() == "STOP: ab"


@pytest.mark.parametrize("num_events", range(1, 8))
@pytest.mark.parametrize(
    "params",
    [
        DecodeParams(temperature=0.0, stop=("vista ridge",), max_tokens=8),
        DecodeParams(temperature=1.0, seed=3, max_tokens=8),
        DecodeParams(temperature=0.0, frequency_penalty=0.5, max_tokens=8, min_tokens=2),
        DecodeParams(temperature=0.0, max_tokens=8, echo_prompt_text="once "),
    ],
)
async def test_a_continued_stream_equals_the_undisturbed_one(num_events: int, params: DecodeParams) -> None:
    engine = await decoder()
    whole, rest = RecordingSink(), RecordingSink()
    usage = await engine.run(step_item((1, 2, 3), params), whole)
    rest.progress = (whole.progress_after(num_events),)

    usage_again = await engine.run(step_item((1, 2, 3), params), rest)

    have = whole.progress_after(num_events)
    assert (*have.token_ids, *rest.ids()) == tuple(whole.ids())
    assert whole.text()[: have.num_text_chars] + rest.text() == whole.text()
    assert have.finish_reason or rest.finish() == whole.finish()
    assert usage_again.completion_tokens == usage.completion_tokens


@pytest.mark.parametrize("num_events", [1, 2, 3])
async def test_held_back_text_survives_a_continuation(num_events: int) -> None:
    params = DecodeParams(stop=("STOP",), temperature=0.0)
    engine = await decoder(pieces_hex=["616253", "544ff0", "9f9880", "21"])
    whole = RecordingSink()
    await engine.run(step_item((1,), params), whole)
    rest = RecordingSink(progress=(whole.progress_after(num_events),))

    await engine.run(step_item((1,), params), rest)

    assert whole.text() == "abSTO😀!"
    assert whole.text()[: whole.progress_after(num_events).num_text_chars] + rest.text() == "abSTO😀!"


async def test_a_finished_choice_is_not_generated_again() -> None:
    params = DecodeParams(n=2, max_tokens=4, seed=1)
    engine = await decoder()
    whole = RecordingSink()
    await engine.run(step_item((1,), params), whole)
    rest = RecordingSink(progress=(whole.progress_after(9, 0), whole.progress_after(2, 1)))

    usage = await engine.run(step_item((1,), params), rest)

    assert rest.of(0) == []
    assert usage.completion_tokens == 8


async def test_a_repeated_stream_that_differs_is_an_error_and_shows_nothing() -> None:
    params = DecodeParams(temperature=1.0, seed=3, max_tokens=8)
    sink = RecordingSink(progress=(ChoiceProgress(token_ids=(0, 0, 0), num_text_chars=9),))

    with pytest.raises(StreamDivergedError) as error:
        await (await decoder()).run(step_item((1, 2, 3), params), sink)

    assert error.value.code == "stream_diverged"
    assert sink.events == []


async def test_more_text_than_the_tokens_make_is_a_divergence() -> None:
    sink = RecordingSink(progress=(ChoiceProgress(token_ids=(0,), num_text_chars=500),))

    with pytest.raises(StreamDivergedError):
        await (await decoder()).run(step_item((1,), DecodeParams(temperature=0.0)), sink)


async def test_a_continuation_at_the_limit_only_finishes() -> None:
    sink = RecordingSink(progress=(ChoiceProgress(token_ids=(0, 1), num_text_chars=1),))

    await (await decoder(pieces=list("abc"))).run(step_item((1,), DecodeParams(max_tokens=2, temperature=0.0)), sink)

    assert (sink.ids(), sink.text(), sink.finish()) == ([], "b", ("length", None))


async def test_a_cancelled_request_stops_and_frees_the_engine() -> None:
    engine = await decoder()
    sink = RecordingSink(cancel_after=3)

    with pytest.raises(CancelledWorkError):
        await engine.run(step_item((1,), DecodeParams(n=2, ignore_eos=True)), sink)

    assert (len(sink.events), engine.running()) == (3, 0)


async def test_a_cancelled_request_does_not_wait_for_the_next_token() -> None:
    engine = await decoder(first_token_delay_s=60.0)
    sink = RecordingSink()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        run = group.create_task(_cancelled(engine, sink))
        await asyncio.sleep(0)
        sink.cancelled = True
        assert await run

    assert engine.running() == 0


async def _cancelled(engine: DecodeEngine, sink: RecordingSink) -> bool:
    with pytest.raises(CancelledWorkError):
        await engine.run(step_item((1,), DecodeParams()), sink)
    return True


async def test_an_engine_that_dies_is_not_alive_any_more() -> None:
    engine = await decoder(die_after_tokens=2)
    sink = RecordingSink()

    with pytest.raises(EngineDeadError):
        await engine.run(step_item((1,), DecodeParams()), sink)

    assert (len(sink.ids()), engine.is_alive()) == (2, False)


async def test_a_fault_for_one_prompt_leaves_the_others_alone() -> None:
    engine = await decoder(raise_after_tokens=0, fault_prompt_token=13)
    sink = RecordingSink()

    with pytest.raises(EngineError):
        await engine.run(step_item((1, 13), DecodeParams()), RecordingSink())
    await engine.run(step_item((1, 2), DecodeParams()), sink)

    assert sink.finish() == ("stop", None)


async def test_images_are_taken_in_their_order_by_a_model_that_takes_them() -> None:
    params = DecodeParams(max_tokens=4, temperature=0.0)
    red, blue = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    engine = await decoder(hidden_size=4)
    sinks = [RecordingSink() for _ in range(3)]

    for sink, images in zip(sinks, ([red, blue], [red, blue], [blue, red]), strict=True):
        await engine.run(step_item((1,), params, images), sink)

    assert sinks[0].text() == sinks[1].text() != sinks[2].text()


async def test_a_text_model_refuses_images() -> None:
    with pytest.raises(InvalidInputError):
        await (await decoder()).run(step_item((1,), DecodeParams(), [np.zeros((2, 4), np.float32)]), RecordingSink())


async def test_the_card_says_what_the_model_takes() -> None:
    text = await DecodeEngine(ScriptedEngine({}), model="a", slots=2, max_images=4).start()
    both = await DecodeEngine(ScriptedEngine({"hidden_size": 4}), model="b", slots=2, max_images=4).start()

    assert (text[0].input_modalities, text[0].max_images) == ((Modality.TEXT,), 0)
    assert (both[0].input_modalities, both[0].max_images) == ((Modality.TEXT, Modality.IMAGE, Modality.VIDEO), 4)


async def test_recordings_go_to_models_that_hear_only() -> None:
    item = step_item((1,), DecodeParams(), [np.zeros((2, 4), np.float32)])
    heard = MediaItem(part="p", kind="audio", width=0, height=0, mode="mono", sha256="", num_tokens=2)
    known = msgspec.structs.replace(
        item.task.inputs["pre"], result=PreprocessResult(num_prompt_tokens=3, media=(heard,))
    )
    task = msgspec.structs.replace(item.task, inputs={**item.task.inputs, "pre": known})
    item = dataclasses.replace(item, task=task)
    hearing = DecodeEngine(ScriptedEngine({"hidden_size": 4, "media": ["audio"]}), model="m", slots=2, max_audios=3)
    seeing = DecodeEngine(ScriptedEngine({"hidden_size": 4}), model="m", slots=2)
    (card,) = await hearing.start()
    await seeing.start()

    await hearing.run(item, RecordingSink())
    with pytest.raises(InvalidInputError, match="audio"):
        await seeing.run(item, RecordingSink())

    assert (card.input_modalities, card.max_audios, card.max_images) == ((Modality.TEXT, Modality.AUDIO), 3, 0)


async def test_the_scripted_engine_refuses_a_schema() -> None:
    with pytest.raises(InvalidInputError) as refused:
        await decoded(DecodeParams(response_schema='{"type": "object"}'))

    assert refused.value.param == "response_schema"
