"""all-MiniLM-L6-v2 through the real embedder, beside sentence-transformers on the same files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_models import minilm

pytestmark = pytest.mark.models

TEXTS = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Ein Mann isst etwas, naïvely. 你好",
    "word " * 200,
    "a",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = Path(os.environ.get("FLEET_TEST_MODELS", str(tmp_path_factory.mktemp("models"))))
    return minilm.prepare_minilm(cache, lambda _: None)


def token_ids(folder: Path, texts: Sequence[str]) -> list[Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [np.asarray(tokenizer.encode(text).ids, dtype=np.int32) for text in texts]


async def test_vectors_equal_those_of_sentence_transformers(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    from fleet_decode.engine.encoder import TransformersEmbedder

    embedder = TransformersEmbedder(str(folder), {"threads": 1})
    model = await embedder.start()
    ids = token_ids(folder, TEXTS)
    together = np.stack(await embedder.embed(ids, [0] * len(ids)))
    alone = np.stack([(await embedder.embed([one], [0]))[0] for one in ids])
    await embedder.close()
    reference = SentenceTransformer(str(folder), device="cpu").encode(list(TEXTS))

    assert (model.context_tokens, model.hidden_size, model.dimensions) == (256, 384, ())
    np.testing.assert_allclose(together, alone, atol=1e-4)
    cosines = (together * reference).sum(axis=1) / np.linalg.norm(reference, axis=1)
    assert cosines.min() > 0.9999
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    similar = together @ together[0]
    assert similar[1] > 0.6 > similar[2:].max()


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode_weightedmean_tokens": True}, None),
    ],
)
def test_pooling_is_read_from_the_files(tmp_path: Path, config: dict[str, Any], pooling: str | None) -> None:
    from fleet_decode.engine.encoder import PoolingRule, read_pooling

    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))

    if pooling is None:
        with pytest.raises(ValueError, match="pooling"):
            read_pooling(tmp_path)
    else:
        assert read_pooling(tmp_path) == PoolingRule(pooling, is_normalized=False)  # type: ignore[arg-type]


def test_a_module_nobody_runs_here_is_refused(tmp_path: Path) -> None:
    from fleet_decode.engine.encoder import read_pooling

    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ValueError, match="Dense"):
        read_pooling(tmp_path)


def test_each_pooling_sees_tokens_and_no_padding() -> None:
    import torch

    from fleet_decode.engine.encoder import pool

    states = torch.tensor([[[1.0, 4.0], [3.0, 2.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1, 0]])

    pooled = {name: pool(states, mask, name).tolist() for name in ("mean", "cls", "last", "max")}

    assert pooled == {"mean": [[2.0, 3.0]], "cls": [[1.0, 4.0]], "last": [[3.0, 2.0]], "max": [[3.0, 4.0]]}
