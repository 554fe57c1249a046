"""What surrounds vLLM: its arguments and environment, the guard, vocabularies, placeholders, the starter thread."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from fleet_common.errors import EngineError, InvalidInputError
from fleet_contracts.base import Modality
from fleet_decode.app import UnknownEngineError, build_engine
from fleet_decode.core.placeholders import collapse, replace_some
from fleet_decode.engine.environment import GUARD_DIR, decode_environment
from fleet_decode.engine.families import FAMILIES
from fleet_decode.engine.port import ImageEmbeds
from fleet_decode.engine.thread import DaemonThread
from fleet_decode.engine.tokens import TokenizerVocabulary
from fleet_decode.engine.vllm_arguments import ModelFacts, engine_arguments, model_facts
from fleet_decode.settings import DecodeSettings

TEXT = ModelFacts(family=None, image_token_id=None, image_tokens=0, revision="r")
LLAVA = ModelFacts(family=FAMILIES["llava"], image_token_id=9, image_tokens=16, revision="r")


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, one longer token, one special and one plain added token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: i for i, token in enumerate(sorted(alphabet))}
    vocab["Ġthe"] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken("plain text", special=False)])
    return tokenizer


TOKENIZER = byte_level_tokenizer()
VOCABULARY = TokenizerVocabulary(TOKENIZER)


@given(ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_streamed_text_equals_one_decode_of_all_ids(ids: list[int]) -> None:
    detokenizer = VOCABULARY.detokenizer()

    text = "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])

    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_bytes_of_tokens_name_special_ones_and_keep_parts_of_characters() -> None:
    ids = TOKENIZER.encode("é the", add_special_tokens=False).ids

    assert b"".join(VOCABULARY.token_bytes(token_id) for token_id in ids) == "é the".encode()
    assert VOCABULARY.token_bytes(ids[0]) == b"\xc3"
    assert VOCABULARY.token_bytes(TOKENIZER.token_to_id("<eos>")) == b"<eos>"
    assert VOCABULARY.token_bytes(10**6) == b""


def test_the_operators_arguments_win_key_by_key() -> None:
    given_arguments = {"dtype": "bfloat16", "max_num_seqs": 3, "anything_new": {"a": 1}}

    arguments = engine_arguments("m", slots=8, facts=TEXT, is_cpu=True, given=given_arguments)

    assert arguments.items() >= given_arguments.items()
    assert (arguments["model"], arguments["enforce_eager"]) == ("m", True)


def test_a_gpu_gets_no_cpu_defaults_and_a_text_model_no_media_limits() -> None:
    arguments = engine_arguments("m", slots=8, facts=TEXT, is_cpu=False, given={})

    assert not {"dtype", "enforce_eager", "distributed_executor_backend", "limit_mm_per_prompt"} & arguments.keys()
    assert arguments["max_num_seqs"] == 8


def test_a_model_that_takes_images_gets_embeddings_and_no_tower() -> None:
    arguments = engine_arguments("m", slots=8, facts=LLAVA, is_cpu=True, given={})

    assert arguments["enable_mm_embeds"] is True
    assert arguments["limit_mm_per_prompt"] == {"image": 0}


def test_facts_come_from_the_models_folder(tmp_path: Path) -> None:
    config = {"model_type": "llava", "vision_config": {}, "image_token_index": 7, "image_seq_length": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))

    facts = model_facts(tmp_path)

    assert (facts.family, facts.image_token_id, facts.image_tokens) == (FAMILIES["llava"], 7, 16)
    assert facts.revision


def test_a_model_that_hears_gets_embeddings_in_place_of_its_audio_token(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_audio", "audio_config": {}, "audio_token_index": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))

    facts = model_facts(tmp_path)
    arguments = engine_arguments("m", slots=8, facts=facts, is_cpu=True, given={})

    assert facts.takes == (Modality.AUDIO,)
    assert facts.token_id("audio") == 11
    with pytest.raises(InvalidInputError, match="no image"):
        facts.token_id("image")
    assert arguments["limit_mm_per_prompt"] == {"audio": 0}


@pytest.mark.parametrize(("model_type", "tower"), [("idefics3", "vision_config"), ("ultravox", "audio_config")])
def test_a_family_nobody_wrote_an_adapter_for_is_refused_by_name(tmp_path: Path, model_type: str, tower: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, tower: {}}))

    with pytest.raises(ValueError, match=model_type):
        model_facts(tmp_path)


def test_grids_go_beside_the_embeddings_where_a_family_wants_them() -> None:
    images = [ImageEmbeds(np.zeros((2, 4)), "float32", grid=(1, 2, 4)), ImageEmbeds(np.zeros((1, 4)), "float32")]

    with pytest.raises(EngineError, match="grid"):
        FAMILIES["qwen2_vl"].media_data("image", images, [])


def test_a_video_stands_where_a_picture_would_until_vllm_takes_it_as_such(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_vl", "vision_config": {}, "image_token_id": 7, "video_token_id": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))

    facts = model_facts(tmp_path)

    assert facts.takes == (Modality.IMAGE, Modality.VIDEO)
    assert (facts.token_id("image"), facts.token_id("video"), facts.video_token_id) == (7, 7, 8)
    handed = {name: FAMILIES[name].handed_as("video") for name in ("qwen2_vl", "llava", "internvl")}
    assert handed == {"qwen2_vl": "video", "llava": "image", "internvl": "image"}
    assert replace_some([1, 7, 7, 2, 7], 7, 8, [True, False, True]) == [1, 8, 7, 2, 8]


@pytest.mark.parametrize(
    ("prompt", "counts", "expected"),
    [
        ([1, 9, 9, 9, 2], [3], [1, 9, 2]),
        ([9, 9, 1, 9], [2, 1], [9, 1, 9]),
        ([9, 9, 9, 1], [1, 2], [9, 9, 1]),
        ([1, 9, 2, 9], [4, 5], [1, 9, 2, 9]),
        ([1, 2], [], [1, 2]),
    ],
)
def test_the_tokens_of_an_image_become_one(prompt: list[int], counts: list[int], expected: list[int]) -> None:
    assert collapse(prompt, 9, counts) == expected


@pytest.mark.parametrize(("prompt", "counts"), [([9, 9, 1], [3]), ([9, 1, 9], [2]), ([9, 9], []), ([1], [2])])
def test_image_tokens_that_are_not_those_of_the_images_are_refused(prompt: list[int], counts: list[int]) -> None:
    with pytest.raises(InvalidInputError):
        collapse(prompt, 9, counts)


def test_a_folder_is_served_offline_and_an_id_is_not(tmp_path: Path) -> None:
    folder = decode_environment(str(tmp_path), threads=2, kv_cache_gib=3)

    assert folder["HF_HUB_OFFLINE"] == "1"
    assert (folder["OMP_NUM_THREADS"], folder["VLLM_CPU_KVCACHE_SPACE"]) == ("2", "3")
    assert "HF_HUB_OFFLINE" not in decode_environment("org/model", threads=1, kv_cache_gib=1)


def test_the_guard_stands_in_for_torchvision_and_runs_the_next_sitecustomize(tmp_path: Path) -> None:
    """In a process with a CPU torch and no torchvision, both made up here."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('the guard must not import torch')")
    (tmp_path / "torch" / "version.py").write_text("cuda = None\nhip = None\n")
    (tmp_path / "sitecustomize.py").write_text("print('next')")
    code = (
        "from torchvision.transforms.v2 import functional as f\n"
        "import torchvision.transforms as t\n"
        "print(t.InterpolationMode.BICUBIC.__name__)"
    )

    printed = _python(code, [GUARD_DIR, tmp_path])

    assert printed == ["next", "BICUBIC"]


def test_the_guard_leaves_a_cuda_torch_alone(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\nhip = None\n")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("import torchvision._meta_registrations as m\nprint(m.real)")
    (tmp_path / "torchvision" / "_meta_registrations.py").write_text("real = True")

    assert _python("import torchvision", [GUARD_DIR, tmp_path]) == ["True"]


def test_the_guard_skips_the_one_module_that_fails_beside_a_cpu_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text("cuda = None\nhip = None\n")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("from torchvision import _meta_registrations\nreal = True")
    (tmp_path / "torchvision" / "_meta_registrations.py").write_text("raise RuntimeError('no such operator')")

    assert _python("import torchvision\nprint(torchvision.real)", [GUARD_DIR, tmp_path]) == ["True"]


def _python(code: str, path: list[Path]) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(entry) for entry in path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


async def test_the_starter_thread_runs_calls_in_order_on_one_thread_and_passes_errors_on() -> None:
    thread = DaemonThread("test")

    first, second = await asyncio.gather(thread.run(threading.get_ident), thread.run(threading.get_ident))
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    thread.stop()

    assert first == second != threading.get_ident()


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(UnknownEngineError):
        build_engine(DecodeSettings(pool="p", model="m", engine="fast"))
