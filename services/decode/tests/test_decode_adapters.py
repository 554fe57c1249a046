"""LoRA adapters on vLLM: a tiny model and random adapters, against weights merged by hand in transformers."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fleet_common.errors import InvalidInputError
from fleet_contracts.decode import DecodeParams
from fleet_decode.engine.environment import GUARD_DIR, decode_environment
from fleet_decode.engine.vllm import VllmEngine
from fleet_decode.testing import RecordingSink, step_item
from fleet_decode.worker import DecodeEngine

pytestmark = [pytest.mark.models, pytest.mark.asyncio(loop_scope="module")]

HIDDEN, INNER, LAYERS, VOCABULARY = 64, 128, 2, 256
NUM_TOKENS = 16
MAX_RANK = 8
#: More than a block of the prefix cache.
LONG_PROMPT = (250, *((i * 7) % 240 for i in range(150)))
PROMPT = (250, 5, 17, 33)


def make_base(folder: Path) -> Any:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {**{f"t{i}": i for i in range(250)}, "<s>": 250, "</s>": 251, "<unk>": 252}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=250,
        eos_token_id=251,
    )
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder)
    return base


def make_adapter(folder: Path, base: Any, seed: int, rank: int = 4) -> Any:
    """Write a random adapter; returns the base with it merged."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    sizes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, 32), "mlp.down_proj": (INNER, HIDDEN)}
    merged = copy.deepcopy(base)
    weights = {}
    for layer in range(LAYERS):
        for name, (num_in, num_out) in sizes.items():
            down = torch.randn(rank, num_in, generator=random) * 0.3
            up = torch.randn(num_out, rank, generator=random) * 0.3
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
            merged.get_submodule(f"model.layers.{layer}.{name}").weight.data += 2.0 * up @ down
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


@dataclass
class Rig:
    adapters: Path
    engine: DecodeEngine
    references: dict[str, Any]

    async def run(self, adapter: str, prompt: tuple[int, ...] = PROMPT, request_id: str = "r") -> tuple[list[int], int]:
        """Token ids of a greedy answer, and how many of the prompt's came from the cache."""
        sink = RecordingSink()
        params = DecodeParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, adapter=adapter)
        usage = await self.engine.run(step_item(prompt, params, request=request_id), sink)
        return sink.ids(), usage.cached_tokens

    def expected(self, adapter: str, prompt: tuple[int, ...] = PROMPT) -> list[int]:
        import torch

        found = self.references[adapter].generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answer: list[int] = found[0, len(prompt) :].tolist()
        return answer


def run_guard() -> None:
    """What Python does at start with the guard's folder on PYTHONPATH."""
    spec = importlib.util.spec_from_file_location("decode_guard", GUARD_DIR / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("lora")
    base = make_base(folder / "base")
    adapters = folder / "adapters"
    adapters.mkdir()
    references = {"": base}
    for number, name in enumerate(("pirate", "poet"), start=1):
        references[name] = make_adapter(folder / name, base, seed=number)
        (adapters / name).symlink_to(folder / name)
    make_adapter(folder / "giant", base, seed=9, rank=4 * MAX_RANK)
    (adapters / "giant").symlink_to(folder / "giant")
    os.environ |= decode_environment(str(folder / "base"), threads=1, kv_cache_gib=1)
    run_guard()
    arguments = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": MAX_RANK}
    vllm = VllmEngine(str(folder / "base"), slots=4, engine_args=arguments, adapters_dir=adapters)
    engine = DecodeEngine(vllm, model="m", slots=4)
    await engine.start()
    yield Rig(adapters, engine, references)
    await engine.close()


@pytest.mark.parametrize("adapter", ["", "pirate", "poet"])
async def test_an_adapter_answers_as_its_merged_weights_do(rig: Rig, adapter: str) -> None:
    tokens, _ = await rig.run(adapter)

    assert tokens == rig.expected(adapter)


async def test_adapters_change_the_answer(rig: Rig) -> None:
    answers = [tuple(rig.expected(adapter)) for adapter in ("", "pirate", "poet")]

    assert len(set(answers)) == 3


async def test_a_batch_may_mix_adapters_and_requests_without_one(rig: Rig) -> None:
    mix = ("", "pirate", "poet", "")

    answers = await asyncio.gather(*(rig.run(adapter, request_id=f"mix{i}") for i, adapter in enumerate(mix)))

    assert [tokens for tokens, _ in answers] == [rig.expected(adapter) for adapter in mix]


async def test_a_cached_prefix_is_never_another_adapters(rig: Rig) -> None:
    first = {adapter: await rig.run(adapter, LONG_PROMPT) for adapter in ("", "pirate", "poet")}
    again = {adapter: await rig.run(adapter, LONG_PROMPT) for adapter in ("", "pirate", "poet")}

    assert [num_cached for _, num_cached in first.values()] == [0, 0, 0]
    assert all(num_cached > 0 for _, num_cached in again.values())
    assert [tokens for tokens, _ in again.values()] == [tokens for tokens, _ in first.values()]


@pytest.mark.parametrize("adapter", ["nobody", "giant", "../base", ".."])
async def test_an_adapter_that_cannot_be_loaded_is_that_requests_fault_alone(rig: Rig, adapter: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await rig.run(adapter)
    tokens, _ = await rig.run("pirate")

    assert (caught.value.param, caught.value.code) == ("model", "adapter_unusable")
    assert tokens == rig.expected("pirate")
    assert rig.engine.is_alive()


async def test_the_worker_tells_which_adapters_it_holds(rig: Rig) -> None:
    await rig.run("poet")
    await rig.run("pirate")

    assert rig.engine.adapters()[-2:] == ("poet", "pirate")
    assert "giant" not in rig.engine.adapters()


async def test_an_adapter_that_was_replaced_answers_anew(rig: Rig, tmp_path: Path) -> None:
    merged = make_adapter(tmp_path / "changed", rig.references[""], seed=5)
    link = rig.adapters / "changing"
    link.symlink_to((rig.adapters / "pirate").resolve())
    before, _ = await rig.run("changing", LONG_PROMPT)
    link.unlink()
    link.symlink_to(tmp_path / "changed")

    after, num_cached = await rig.run("changing", LONG_PROMPT)
    short, _ = await rig.run("changing")

    rig.references["changing"] = merged
    assert after != before
    assert num_cached == 0
    assert short == rig.expected("changing")
