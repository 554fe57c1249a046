"""The real models through the chat path of transformers. Slow: about a minute."""

import random
import time

import pytest

from fleet_models import prepare
from tests.support.scenes import render
from tests.support.skills import SKILLS

pytestmark = pytest.mark.models


def ignore(line: str) -> None:
    """Progress nobody reads."""


def test_smollm2_answers_and_is_prepared_once(model_cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare("smollm2-135m-instruct", model_cache, ignore)
    started_s = time.monotonic()
    assert prepare("smollm2-135m-instruct", model_cache, ignore) == folder
    assert time.monotonic() - started_s < 0.1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :])

    assert tokenizer.eos_token == "<|im_end|>"
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_vlm_chat_template_keeps_the_order_of_parts(model_cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare("omnifleet-vlm", model_cache, ignore))
    parts = [{"type": "text", "text": "A"}, {"type": "image_url"}, {"type": "text", "text": "B"}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )

    assert prompt == "<|im_start|>user\nA<image>B<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def vlm(model_cache):
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    folder = prepare("omnifleet-vlm", model_cache, ignore)
    return LlavaForConditionalGeneration.from_pretrained(folder, dtype="float32"), AutoProcessor.from_pretrained(folder)


def answers(vlm, tasks, picture_first):
    model, processor = vlm
    texts = []
    for task in tasks:
        parts = [{"type": "image"}, {"type": "text", "text": task.text}]
        message = {"role": "user", "content": parts if picture_first else parts[::-1]}
        prompt = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        inputs = processor(text=prompt, images=render(task.scene), return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        texts.append(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("picture_first", [True, False])
@pytest.mark.parametrize("skill", SKILLS)
def test_vlm_understands_pictures_drawn_by_others(vlm, skill, picture_first):
    rng = random.Random(2024)
    tasks = [SKILLS[skill][0](rng) for _ in range(10)]

    said = answers(vlm, tasks, picture_first)

    wrong = [(task.text, text, task.scene) for task, text in zip(tasks, said, strict=True) if not task.is_right(text)]
    assert len(wrong) <= 2, wrong


def test_minilm_is_laid_out_as_sentence_transformers_has_it(model_cache):
    folder = prepare("all-minilm-l6-v2", model_cache, ignore)
    started_s = time.monotonic()
    assert prepare("all-minilm-l6-v2", model_cache, ignore) == folder
    assert time.monotonic() - started_s < 0.1

    assert (folder / "1_Pooling" / "config.json").is_file()
    assert (folder / "model.safetensors").stat().st_size == 90868376
    assert "license: apache-2.0" in (folder / "README.md").read_text()
