"""Inputs of embedding models: token ids one after the other, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from fleet_common.errors import ContextLengthError, FleetError, InvalidInputError
from fleet_common.stage.port import Product
from fleet_contracts.preprocess import PreprocessResult
from fleet_preprocess.core.limits import MAX_EMBEDDING_TOKENS, check_inputs
from fleet_preprocess.engine.real import CheckpointPromptEngine
from fleet_preprocess.engine.scripted import END_ID, START_ID

Run = Callable[..., Awaitable[Product | FleetError]]


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", [[START_ID, *b"hi", END_ID]]),
        (["hi", "yo!"], [[START_ID, *b"hi", END_ID], [START_ID, *b"yo!", END_ID]]),
        ([104, 105], [[104, 105]]),
        ([[104], [105, 106]], [[104], [105, 106]]),
    ],
)
async def test_every_form_of_input_becomes_token_ids_in_order(run: Run, given: Any, ids: list[list[int]]) -> None:
    product = await run({"input": given}, route="embedding")

    assert isinstance(product, Product)
    assert product.tensors["prompt"].tolist() == [token_id for one in ids for token_id in one]
    assert product.tensors["lengths"].tolist() == [len(one) for one in ids]
    assert product.tensors["prompt"].dtype == product.tensors["lengths"].dtype == np.int32
    assert product.result == PreprocessResult(num_prompt_tokens=sum(len(one) for one in ids))


@pytest.mark.parametrize(
    ("given", "param", "kind"),
    [
        ("", "input", InvalidInputError),
        ([], "input", InvalidInputError),
        (["a", ""], "input", InvalidInputError),
        (["a", 1], "input", InvalidInputError),
        ({}, None, InvalidInputError),
        ([259], "input", InvalidInputError),
        ([[1], [-1]], "input[1]", InvalidInputError),
        (["a", "x" * 8191], "input[1]", ContextLengthError),
        ("x" * 8191, "input", ContextLengthError),
        ("x" * 100_000, "input", ContextLengthError),
    ],
)
async def test_bad_inputs_are_refused_by_name(run: Run, given: Any, param: str | None, kind: type) -> None:
    refused = await run({"input": given}, route="embedding")

    assert isinstance(refused, kind)
    assert refused.param == param


def test_a_request_is_bounded_as_a_whole() -> None:
    check_inputs([100] * (MAX_EMBEDDING_TOKENS // 100), 100)

    with pytest.raises(ContextLengthError, match="300000"):
        check_inputs([100] * (MAX_EMBEDDING_TOKENS // 100 + 1), 100)


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "[", "]", "cls", "sep")
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    (tmp_path / "modules.json").write_text("[]")
    return tmp_path


def test_an_encoder_gets_its_special_tokens_and_text_can_write_none(bert_folder: Path) -> None:
    engine = CheckpointPromptEngine(str(bert_folder), {}, "0123456789abcdef")
    facts = engine.load()

    assert engine.embedding_ids("Hello world") == [2, 4, 5, 3]
    assert engine.embedding_ids("[SEP] hello") == [2, 6, 9, 7, 4, 3]
    assert engine.embedding_ids("hello " * 6) == [2, *[4] * 6, 3]
    assert facts.context_tokens == 256
