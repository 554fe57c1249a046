"""Text in, text out, driven by the official client against the real model."""

from __future__ import annotations

import openai
import pytest

pytestmark = pytest.mark.e2e
MODEL = "omnifleet-vlm"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def ask(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
    """One greedy chat completion of the capital question unless `fields` say otherwise."""
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    return client.chat.completions.create(**body)


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = ask(client)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_whole_answer_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = ask(client)

    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    answer = ask(client, stop=["Paris"])

    assert "Paris" not in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_cuts_with_finish_reason_length(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_the_same_seed_gives_the_same_sample_and_n_gives_n_choices(client: openai.OpenAI) -> None:
    first = ask(client, temperature=1.0, seed=7, n=2)
    second = ask(client, temperature=1.0, seed=7, n=2)

    assert [choice.index for choice in first.choices] == [0, 1]
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]


def test_logprobs_report_the_chosen_token_among_the_best(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)

    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    for position in answer.choices[0].logprobs.content:
        assert len(position.top_logprobs) == 3
        assert position.logprob <= 0
    joined = b"".join(bytes(position.bytes or []) for position in answer.choices[0].logprobs.content).decode()
    assert (answer.choices[0].message.content or "") in joined


def test_completions_continue_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=1
    )

    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens


def test_models_tell_what_they_take_and_give(client: openai.OpenAI) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}

    assert set(models[MODEL]["input_modalities"]) == {"text", "image", "video"}
    assert models[MODEL]["output_modalities"] == ["text"]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="nope")
    with pytest.raises(openai.BadRequestError) as unsupported:
        ask(client, functions=[{"name": "f"}])
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(client, messages=[{"role": "user", "content": "word " * 9000}])

    assert unknown.value.code == "model_not_found"
    assert unsupported.value.param == "functions"
    assert too_long.value.code == "context_length_exceeded"
