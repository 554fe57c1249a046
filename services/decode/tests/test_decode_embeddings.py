"""Embeddings over the scripted embedder: batches, order, failures, and which engine a model gets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_common.errors import EngineDeadError, EngineError, InvalidInputError
from fleet_common.stage.port import Product
from fleet_contracts.base import Modality
from fleet_contracts.decode import DecodeParams
from fleet_contracts.embed import EmbedParams, EmbedResult
from fleet_decode.app import UnknownEngineError, build_engine
from fleet_decode.core.embed_batches import batches_by_length
from fleet_decode.embed_worker import EmbedEngine
from fleet_decode.engine.embed_scripted import ScriptedEmbedder
from fleet_decode.settings import DecodeSettings
from fleet_decode.testing import embed_item
from fleet_decode.worker import DecodeEngine

WIDTH = 32
PARAMS = EmbedParams()


async def embedder(**engine_args: Any) -> tuple[EmbedEngine, ScriptedEmbedder]:
    scripted = ScriptedEmbedder(engine_args)
    engine = EmbedEngine(scripted, model="emb", slots=32)
    await engine.start()
    return engine, scripted


def vectors_of(result: Any) -> np.ndarray:
    assert isinstance(result, Product)
    return result.tensors["vectors"]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 1000))
def test_every_input_is_in_one_batch_that_fits(lengths: list[int], max_tokens: int) -> None:
    batches = batches_by_length(lengths, max_tokens)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= max_tokens


def test_inputs_of_like_length_share_a_batch() -> None:
    assert batches_by_length([1, 100, 2, 99], 200) == [[1, 3], [2, 0]]


async def test_vectors_come_in_the_order_of_the_inputs() -> None:
    engine, _ = await embedder(max_batch_tokens=8)
    inputs = [[1], [2, 3, 4], [5, 6], [7] * 6]

    (together,) = await engine.run([embed_item(inputs, PARAMS)])
    alone = [vectors_of((await engine.run([embed_item([one], PARAMS)]))[0])[0] for one in inputs]

    assert vectors_of(together).dtype == np.float32
    np.testing.assert_array_equal(vectors_of(together), np.stack(alone))
    assert together.result == EmbedResult(num_prompt_tokens=12)


async def test_requests_of_a_batch_share_passes_and_get_their_own_vectors() -> None:
    engine, scripted = await embedder()

    first, second = await engine.run([embed_item([[1], [2]], PARAMS, "a"), embed_item([[3, 3]], PARAMS, "b")])

    assert (vectors_of(first).shape, vectors_of(second).shape) == ((2, WIDTH), (1, WIDTH))
    assert vectors_of(second)[0].argmax() == 3
    assert scripted.num_passes == 1


async def test_vectors_are_cut_to_the_width_that_was_asked_for() -> None:
    engine, _ = await embedder(dimensions=[8])

    cut, whole = await engine.run([embed_item([[1]], EmbedParams(dimensions=8)), embed_item([[1]], PARAMS)])

    assert (vectors_of(cut).shape, vectors_of(whole).shape) == ((1, 8), (1, WIDTH))


@pytest.mark.parametrize(("params", "param"), [(EmbedParams(dimensions=5), "dimensions"), (DecodeParams(), "model")])
async def test_a_step_it_cannot_run_fails_alone(params: Any, param: str) -> None:
    engine, _ = await embedder()

    refused, good = await engine.run([embed_item([[1]], params), embed_item([[1]], PARAMS)])

    assert isinstance(refused, InvalidInputError)
    assert refused.param == param
    assert vectors_of(good).shape == (1, WIDTH)


async def test_a_step_without_inputs_is_refused() -> None:
    engine, _ = await embedder()

    (refused,) = await engine.run([embed_item([], PARAMS)])

    assert isinstance(refused, InvalidInputError)


async def test_a_pass_that_fails_is_the_whole_batchs_failure() -> None:
    engine, _ = await embedder(fault_token=9)

    with pytest.raises(EngineError):
        await engine.run([embed_item([[9]], PARAMS), embed_item([[1]], PARAMS)])


async def test_a_long_request_does_not_hold_a_short_one_up() -> None:
    engine, _ = await embedder(max_batch_tokens=1, delay_s=0.001)
    order: list[str] = []

    async def run(name: str, num_inputs: int) -> None:
        await engine.run([embed_item([[1]] * num_inputs, PARAMS, name)])
        order.append(name)

    await asyncio.gather(run("long", 50), run("short", 1))

    assert order == ["short", "long"]


async def test_the_card_says_what_the_model_takes_and_makes() -> None:
    engine = EmbedEngine(ScriptedEmbedder({"dimensions": [8]}), model="emb", slots=2)
    (card,) = await engine.start()

    assert (card.input_modalities, card.output_modalities) == ((Modality.TEXT,), (Modality.EMBEDDING,))
    assert (card.context_tokens, card.hidden_size, card.embedding_dimensions) == (256, WIDTH, (8,))
    await engine.close()


async def test_nothing_runs_before_the_start() -> None:
    with pytest.raises(EngineDeadError):
        await EmbedEngine(ScriptedEmbedder({}), model="emb", slots=2).run([])


def settings(**values: Any) -> DecodeSettings:
    return DecodeSettings(pool="p", model="m", engine="scripted", **values)


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ({"architectures": ["BertModel"]}, EmbedEngine),
        ({"architectures": ["LlamaForCausalLM"]}, DecodeEngine),
        ({}, DecodeEngine),
    ],
)
def test_a_model_folder_says_which_engine_it_needs(tmp_path: Path, config: Any, engine: type) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert isinstance(build_engine(settings(model_path=str(tmp_path))), engine)


def test_the_operator_can_say_it_too(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")

    assert isinstance(build_engine(settings(runner="embed")), EmbedEngine)
    assert isinstance(build_engine(settings(model_path=str(tmp_path))), EmbedEngine)
    assert isinstance(build_engine(settings(runner="generate", model_path=str(tmp_path))), DecodeEngine)


def test_an_unknown_embedder_is_refused() -> None:
    with pytest.raises(UnknownEngineError):
        build_engine(DecodeSettings(pool="p", model="m", engine="other", runner="embed"))
