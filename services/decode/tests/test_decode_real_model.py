"""One vLLM engine with a LLaVA folder over SmolLM2: text and pictures, continuation, death."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from fleet_common.errors import CancelledWorkError, ContextLengthError, EngineDeadError, InvalidInputError
from fleet_contracts.base import Modality
from fleet_contracts.decode import DecodeParams
from fleet_decode.engine.environment import GUARD_DIR, decode_environment
from fleet_decode.engine.port import EngineModel
from fleet_decode.engine.vllm import VllmEngine
from fleet_decode.testing import RecordingSink, step_item
from fleet_decode.worker import DecodeEngine
from fleet_models import tower, vlm

pytestmark = [pytest.mark.models, pytest.mark.asyncio(loop_scope="module")]

GREEDY = DecodeParams(temperature=0.0, max_tokens=48)
CONTEXT_TOKENS = 1024
CITY_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
        "required": ["name", "is_capital"],
        "additionalProperties": False,
    }
)


@dataclass
class Rig:
    folder: Path
    tokenizer: Any
    vllm: VllmEngine
    engine: DecodeEngine

    @property
    def image_token_id(self) -> int:
        token_id: int = self.tokenizer.token_to_id(vlm.IMAGE_TOKEN)
        return token_id

    def prompt(self, question: str, num_images: int = 0) -> tuple[int, ...]:
        """Ids of a chat turn, every image's tokens in front of the question."""
        head = self.tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
        tail = self.tokenizer.encode(f"{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        return (*head, *(self.image_token_id,) * (tower.NUM_IMAGE_TOKENS * num_images), *tail)

    async def run(self, prompt: tuple[int, ...], params: DecodeParams, **more: Any) -> RecordingSink:
        sink = RecordingSink(progress=more.pop("progress", ()))
        await self.engine.run(step_item(prompt, params, **more), sink)
        return sink


@pytest.fixture(scope="module")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = Path(os.environ.get("FLEET_TEST_MODELS", str(tmp_path_factory.mktemp("models"))))
    return vlm.prepare_vlm(cache, lambda _: None)


@pytest.fixture(scope="module")
def reference(llava_folder: Path) -> Any:
    """The same model as transformers runs it, tower included."""
    import torch
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(llava_folder, dtype=torch.float32).eval()


def run_guard() -> None:
    """What Python does at start with the guard's folder on PYTHONPATH."""
    spec = importlib.util.spec_from_file_location("decode_guard", GUARD_DIR / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(llava_folder: Path) -> AsyncIterator[Rig]:
    from tokenizers import Tokenizer

    for name, value in decode_environment(str(llava_folder), threads=1, kv_cache_gib=1).items():
        os.environ[name] = value
    run_guard()
    vllm = VllmEngine(str(llava_folder), slots=4, engine_args={"max_model_len": CONTEXT_TOKENS})
    engine = DecodeEngine(vllm, model="m", slots=4, max_images=4)
    (card,) = await engine.start()
    assert (card.context_tokens, card.hidden_size, card.image_tokens) == (CONTEXT_TOKENS, 576, tower.NUM_IMAGE_TOKENS)
    yield Rig(llava_folder, Tokenizer.from_file(str(llava_folder / "tokenizer.json")), vllm, engine)
    await engine.close()


async def test_the_model_description_is_complete(rig: Rig) -> None:
    model: EngineModel = rig.vllm._started().model

    assert model.takes == (Modality.IMAGE, Modality.VIDEO)
    assert model.revision
    assert rig.tokenizer.token_to_id("<|im_end|>") in model.eos_token_ids


async def test_the_capital_of_france_is_paris(rig: Rig) -> None:
    sink = await rig.run(rig.prompt("What is the capital of France?"), GREEDY)

    assert "Paris" in sink.text()
    assert sink.finish() == ("stop", None)
    assert len(sink.events) >= 5


async def test_the_streamed_text_is_what_the_tokenizer_decodes(rig: Rig) -> None:
    sink = await rig.run(rig.prompt("Write two lines with emoji and the word café in Japanese."), GREEDY)

    assert sink.text() == rig.tokenizer.decode(sink.ids(), skip_special_tokens=True)


@pytest.mark.parametrize("num_events", [1, 7, 20, 33])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
async def test_a_greedy_stream_continues_as_if_nothing_had_happened(rig: Rig, num_events: int, penalty: float) -> None:
    prompt = rig.prompt("Tell me about the sea.")
    params = DecodeParams(temperature=0.0, max_tokens=40, frequency_penalty=penalty, stop=("zzz",))
    whole = await rig.run(prompt, params)
    have = whole.progress_after(num_events)

    rest = await rig.run(prompt, params, progress=(have,), request="again")

    assert [*have.token_ids, *rest.ids()] == whole.ids()
    assert whole.text()[: have.num_text_chars] + rest.text() == whole.text()
    assert rest.finish() == whole.finish() == ("length", None)


@pytest.mark.parametrize("num_events", [1, 6, 12])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
async def test_a_stream_under_a_schema_continues_as_if_nothing_had_happened(
    rig: Rig, num_events: int, sampling: dict[str, Any]
) -> None:
    prompt = rig.prompt("Describe Paris.")
    params = DecodeParams(max_tokens=64, response_schema=CITY_SCHEMA, **sampling)
    whole = await rig.run(prompt, params)
    have = whole.progress_after(num_events)

    rest = await rig.run(prompt, params, progress=(have,), request="again")

    assert [*have.token_ids, *rest.ids()] == whole.ids()
    assert whole.text()[: have.num_text_chars] + rest.text() == whole.text()
    assert set(json.loads(whole.text())) == {"name", "is_capital"}
    assert whole.finish() == ("stop", None)


@pytest.mark.parametrize(
    "schema",
    ['{"type": "string", "pattern": "("}', '{"type": "string", "pattern": "(a|b|ab|.*c){1,500}x{3,900}"}', "{}}"],
    ids=["no grammar", "does not compile", "no JSON"],
)
async def test_a_schema_the_engine_cannot_hold_is_the_clients_fault(rig: Rig, schema: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        await rig.run(rig.prompt("Hi"), DecodeParams(max_tokens=8, response_schema=schema))
    after = await rig.run(rig.prompt("Hi"), DecodeParams(max_tokens=2))

    assert (refused.value.param, refused.value.code) == ("response_schema", "invalid_schema")
    assert len(after.ids()) == 2


async def test_a_bias_for_a_token_the_model_does_not_have_is_named(rig: Rig) -> None:
    with pytest.raises(InvalidInputError) as refused:
        await rig.run(rig.prompt("Hi"), DecodeParams(max_tokens=8, logit_bias={10**9: 1.0}))

    assert refused.value.param == "logit_bias"


async def test_a_stop_string_ends_the_answer_before_it(rig: Rig) -> None:
    sink = await rig.run(
        rig.prompt("What is the capital of France?"), DecodeParams(temperature=0.0, max_tokens=48, stop=("Paris",))
    )

    assert sink.finish() == ("stop", "Paris")
    assert sink.text().endswith("is ")
    assert rig.engine.running() == 0


async def test_a_seed_repeats_the_answer_and_choices_differ(rig: Rig) -> None:
    params = DecodeParams(temperature=1.0, seed=11, n=2, max_tokens=12)
    prompt = rig.prompt("Name an animal.")

    first, again = [await rig.run(prompt, params) for _ in range(2)]

    assert [first.text(0), first.text(1)] == [again.text(0), again.text(1)]
    assert first.text(0) != first.text(1)


async def test_logprobs_name_the_best_tokens(rig: Rig) -> None:
    sink = await rig.run(
        rig.prompt("What is the capital of France?"), DecodeParams(temperature=0.0, max_tokens=4, logprobs=3)
    )

    for event in sink.events:
        (row,) = event.logprobs
        assert row.chosen.token_id == event.token_ids[0] == row.top[0].token_id
        assert row.chosen.logprob == row.top[0].logprob >= row.top[1].logprob >= row.top[2].logprob
        assert row.chosen.bytes_.decode() == event.text
        assert len(row.top) == 3


async def test_length_ends_an_answer_at_max_tokens_and_at_the_context(rig: Rig) -> None:
    endless = DecodeParams(temperature=0.0, max_tokens=0, ignore_eos=True)
    prompt = (rig.prompt("Tell me a story.") * 80)[: CONTEXT_TOKENS - 5]

    sink = await rig.run(prompt, endless)

    assert (len(sink.ids()), sink.finish()) == (5, ("length", None))
    with pytest.raises(ContextLengthError):
        await rig.run((prompt * 2)[:CONTEXT_TOKENS], endless)


async def test_requests_side_by_side_equal_requests_alone(rig: Rig) -> None:
    prompts = [rig.prompt("What is the capital of France?"), rig.prompt("What is the capital of Italy?")]
    alone = [(await rig.run(prompt, GREEDY)).text() for prompt in prompts]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rig.run(prompt, GREEDY, request=f"p{i}")) for i, prompt in enumerate(prompts)]

    assert [task.result().text() for task in tasks] == alone


async def test_a_cancelled_request_frees_its_sequences(rig: Rig) -> None:
    sink = RecordingSink(cancel_after=3)

    with pytest.raises(CancelledWorkError):
        await rig.engine.run(
            step_item(rig.prompt("Count to a thousand."), DecodeParams(n=2, max_tokens=500, ignore_eos=True)), sink
        )

    assert (rig.engine.running(), rig.engine.kv_cache_usage_ratio()) == (0, 0.0)
    assert rig.vllm._started().llm.get_num_unfinished_requests() == 0


def embeds(seed: int) -> np.ndarray:
    """Rows that look like the language model's own embeddings; read-only, as from the store."""
    rows = np.random.default_rng(seed).normal(0, 0.1, (tower.NUM_IMAGE_TOKENS, 576)).astype(np.float32)
    rows.flags.writeable = False
    return rows


async def test_embeddings_give_the_tokens_transformers_gives_for_the_pixels(rig: Rig, reference: Any) -> None:
    import torch

    pixels = torch.randn((2, 3, tower.IMAGE_SIDE_PX, tower.IMAGE_SIDE_PX), generator=torch.Generator().manual_seed(5))
    prompt = rig.prompt("Describe the picture.", num_images=2)
    params = DecodeParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with torch.inference_mode():
        vision = reference.model.vision_tower(pixels, output_hidden_states=True)
        patches = vision.hidden_states[tower.VISION_FEATURE_LAYER][:, 1:]
        images = list(reference.model.multi_modal_projector(patches).numpy())

    for order in ([0, 1], [1, 0]):
        sink = await rig.run(prompt, params, images=[images[i] for i in order], request=f"order{order[0]}")

        with torch.inference_mode():
            made = reference.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                pixel_values=pixels[order],
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
            )
        assert sink.ids() == made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_events", [1, 9])
async def test_an_answer_about_a_picture_continues(rig: Rig, num_events: int) -> None:
    prompt = rig.prompt("Describe the picture.", num_images=1)
    params = DecodeParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    whole = await rig.run(prompt, params, images=[embeds(3)])
    have = whole.progress_after(num_events)

    rest = await rig.run(prompt, params, images=[embeds(3)], progress=(have,))

    assert [*have.token_ids, *rest.ids()] == whole.ids()


async def test_a_prompt_whose_image_tokens_do_not_fit_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidInputError):
        await rig.run(rig.prompt("Describe.", num_images=3), GREEDY, images=[embeds(1), embeds(2)])


async def test_no_vision_tower_is_loaded(rig: Rig) -> None:
    (modules,) = await rig.vllm._started().llm.collective_rpc("get_model_inspection")

    assert "language_model" in modules
    assert "vision_tower" not in modules or "StageMissingLayer" in modules


async def test_a_stopped_engine_core_is_not_responsive_and_recovers(rig: Rig) -> None:
    (core,) = engine_cores()

    core.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: not rig.engine.is_responsive(), limit_s=15)
        assert rig.engine.is_alive()
    finally:
        core.send_signal(signal.SIGCONT)

    await until(rig.engine.is_responsive, limit_s=5)


async def test_a_killed_engine_core_is_noticed_at_once(rig: Rig) -> None:
    """The last test of this module: nothing works after it."""
    sink = RecordingSink()
    endless = step_item(rig.prompt("Count."), DecodeParams(max_tokens=900, ignore_eos=True))

    async with asyncio.TaskGroup() as group:
        run = group.create_task(died(rig, endless, sink))
        await until(lambda: len(sink.events) > 2, limit_s=10)
        engine_cores()[0].kill()
        assert await run

    assert not rig.engine.is_alive()
    assert not rig.engine.is_responsive()


async def died(rig: Rig, item: Any, sink: RecordingSink) -> bool:
    with pytest.raises(EngineDeadError):
        await rig.engine.run(item, sink)
    return True


def engine_cores() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [
        child for child in children if "multiprocessing-fork" in " ".join(child.cmdline()) or "Engine" in child.name()
    ]


async def until(condition: Any, *, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        await asyncio.sleep(0.05)
