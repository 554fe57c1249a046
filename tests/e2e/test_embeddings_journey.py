"""Embeddings from a whole fleet: the official client, unmodified, beside sentence-transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from fleet_cli.testing import RunningFleet, running_fleet
from fleet_models import minilm

pytestmark = pytest.mark.e2e

MODEL = minilm.NAME
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Two men pushed carts through the woods, naïvely. 你好",
    "word " * 200,
]


@pytest.fixture(scope="module")
def embedding_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """The real model, and no other: without vLLM it starts in seconds."""
    settings = {"FLEET_CHAT_MODEL": MODEL}
    with running_fleet(tmp_path_factory.mktemp("embedding_fleet"), settings) as fleet:
        yield fleet


@pytest.fixture
def client(embedding_fleet: RunningFleet) -> openai.OpenAI:
    """The official client, unmodified."""
    return openai.OpenAI(base_url=f"{embedding_fleet.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_vectors_are_those_of_the_model_and_rank_what_is_related_first(
    client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer

    folder = minilm.prepare_minilm(tmp_path, lambda _: None)
    reference = SentenceTransformer(str(folder), device="cpu")

    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    alone = [client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in TEXTS]
    numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")

    vectors = np.asarray([item.embedding for item in answer.data])
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    assert (vectors * expected).sum(axis=1).min() > 0.9999
    np.testing.assert_allclose(vectors, alone, atol=1e-4)
    np.testing.assert_allclose(vectors, [item.embedding for item in numbers.data], atol=1e-6)
    similar = vectors @ vectors[0]
    assert similar[1] > 0.6 > similar[2:].max()
    tokenizer = reference.tokenizer
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)


def test_token_ids_give_the_vector_of_their_text(client: openai.OpenAI) -> None:
    # [CLS] hello world [SEP]: ids are taken as they are.
    ids = [101, 7592, 2088, 102]

    texts, one, several = (
        np.asarray([item.embedding for item in client.embeddings.create(model=MODEL, input=given).data])
        for given in (["hello world"], ids, [ids, ids])
    )

    np.testing.assert_allclose(one, texts, atol=1e-5)
    np.testing.assert_allclose(several, [texts[0]] * 2, atol=1e-5)


def test_two_thousand_inputs_come_back_in_order(client: openai.OpenAI) -> None:
    texts = [f"number {number}" for number in range(2048)]

    answer = client.embeddings.create(model=MODEL, input=texts)

    vectors = np.asarray([item.embedding for item in answer.data])
    assert vectors.shape == (2048, 384)
    for number in (0, 1000, 2047):
        alone = client.embeddings.create(model=MODEL, input=texts[number]).data[0].embedding
        assert int((vectors @ np.asarray(alone)).argmax()) == number


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": "word " * 300}, "input", "context_length_exceeded"),
        ({"input": ["a", "word " * 300]}, "input[1]", "context_length_exceeded"),
        ({"input": "a", "dimensions": 64}, "dimensions", "invalid_input"),
        ({"input": ""}, "input", "invalid_input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
    ],
)
def test_a_bad_request_names_the_field(
    embedding_fleet: RunningFleet, fields: dict[str, object], param: str, code: str
) -> None:
    answer = httpx.post(f"{embedding_fleet.url}/v1/embeddings", json={"model": MODEL, **fields})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


def test_the_model_is_refused_where_another_belongs(client: openai.OpenAI) -> None:
    card = client.models.retrieve(MODEL)
    assert card.model_dump()["output_modalities"] == ["embedding"]

    with pytest.raises(openai.BadRequestError, match="text with text"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="hi")


def test_an_embedding_model_can_be_all_a_fleet_serves(tmp_path: Path) -> None:
    settings = {"FLEET_ENGINE": "scripted", "FLEET_CHAT_MODEL": "emb", "FLEET_EMBEDDING_MODEL": "emb"}
    with running_fleet(tmp_path, settings) as fleet:
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=30)
        same, other = (client.embeddings.create(model="emb", input=[text, "abc"]).data for text in ("abc", "xyz"))
        stages = {worker["stage"] for worker in fleet.status()["workers"]}

    assert same[0].embedding == same[1].embedding == other[1].embedding != other[0].embedding
    assert stages == {"preprocess", "decode"}
