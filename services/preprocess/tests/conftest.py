"""Fixtures of the preprocess tests: the files of the failure cases, and an engine that takes bodies."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fleet_common.errors import FleetError
from fleet_common.stage.port import Product, StepItem
from fleet_common.testing.steps import first_attempt
from fleet_contracts.base import Stage, StepId
from fleet_contracts.preprocess import PreprocessParams
from fleet_contracts.work import PlanStep
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.engine.scripted import ScriptedPromptEngine
from fleet_preprocess.worker import PreprocessEngine

SHARED_CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"

Run = Callable[..., Awaitable[Product | FleetError]]


@pytest.fixture(scope="session")
def cases_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of cases.md, made afresh."""
    maker = SHARED_CASES / "make_cases.py"
    if not maker.is_file():
        pytest.fail(f"the failure cases are needed beside the checkout: {maker}")
    folder = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, str(maker), str(folder)], check=True, capture_output=True)
    return folder


def step_item(body: bytes, params: PreprocessParams) -> StepItem:
    step = PlanStep(step_id=StepId("pre"), stage=Stage.PREPROCESS, model="vlm", params=params)
    return first_attempt(step, root=body)


async def run_body(engine: PreprocessEngine, body: Any, **params: Any) -> Product | FleetError:
    """One request through the engine; `body` is bytes, or a value to be written as JSON."""
    root = body if isinstance(body, bytes) else json.dumps(body).encode()
    (result,) = await engine.run([step_item(root, PreprocessParams(**params))])
    return result


@pytest.fixture
async def engine() -> AsyncIterator[PreprocessEngine]:
    made = PreprocessEngine("vlm", ScriptedPromptEngine({}), MediaLimits())
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def run(engine: PreprocessEngine) -> Run:
    """Run a body through the scripted model with real image handling."""

    async def run_one(body: Any, **params: Any) -> Product | FleetError:
        return await run_body(engine, body, **params)

    return run_one


@pytest.fixture
def run_image(run: Run) -> Run:
    """Run a chat with one image, given as a path, bytes or URL."""

    async def run_one(image: Path | bytes | str, **params: Any) -> Product | FleetError:
        return await run(chat_with(image), **params)

    return run_one


def chat_with(*images: Path | bytes | str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Which edge is red?"}]
    parts += [{"type": "image_url", "image_url": {"url": as_url(image)}} for image in images]
    return {"model": "vlm", "messages": [{"role": "user", "content": parts}]}


def as_url(image: Path | bytes | str) -> str:
    if isinstance(image, str):
        return image
    data = image.read_bytes() if isinstance(image, Path) else image
    return "data:image/png;base64," + base64.b64encode(data).decode()


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the picture shows a red circle on a blue background", "which edge is red? what is in the picture?"] * 20

WriteCheckpoint = Callable[..., Path]


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """Writes a model folder without weights: a fresh byte-level BPE, a chat template, LLaVA's config files.

    Its image token is *not* marked special, as in some published checkpoints. Context 512, 16 tokens per image.
    """

    def write(template: str = TEMPLATE, *, takes_images: bool = True) -> Path:
        tokenizer = make_tokenizer()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        files: dict[str, Any] = {
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "<|im_end|>",
                "chat_template": template,
            },
            "config.json": {"model_type": "llama", "max_position_embeddings": 512},
        }
        if takes_images:
            files["config.json"] = {
                "model_type": "llava",
                "image_token_index": tokenizer.token_to_id("<image>"),
                "vision_feature_select_strategy": "default",
                "text_config": {"max_position_embeddings": 512},
                "vision_config": {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
            }
            files["preprocessor_config.json"] = {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 32},
                "crop_size": {"height": 32, "width": 32},
            }
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return write


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<image>", special=False, normalized=False), AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return tokenizer


@pytest.fixture
def make_item() -> Callable[[Any, PreprocessParams], StepItem]:
    """A step over a body given as bytes or as a JSON value."""

    def make(body: Any, params: PreprocessParams) -> StepItem:
        return step_item(body if isinstance(body, bytes) else json.dumps(body).encode(), params)

    return make
