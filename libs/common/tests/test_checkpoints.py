"""Model folders: found, read, told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet_common.checkpoints import (
    checkpoint_revision,
    image_processor_config,
    locate_checkpoint,
    makes_embeddings,
    max_input_tokens,
    read_json,
)


def write_folder(folder: Path, weights: bytes = b"w", **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate_checkpoint(str(tmp_path), ["*.json"]) == tmp_path


@pytest.mark.parametrize("name", ["", "/does/not/exist", "a/b/c"])
def test_what_is_neither_a_folder_nor_an_id_is_not_found(name: str) -> None:
    with pytest.raises(FileNotFoundError):
        locate_checkpoint(name, ["*.json"])


def test_revision_follows_weights_and_image_settings(tmp_path: Path) -> None:
    large = bytes(20 << 20)
    folders = [
        write_folder(tmp_path / "a", config={"x": 1}),
        write_folder(tmp_path / "b", config={"x": 2}),
        write_folder(tmp_path / "c", config={"x": 1}, preprocessor_config={"size": 3}),
        write_folder(tmp_path / "d", b"v", config={"x": 1}),
        write_folder(tmp_path / "e", large, config={"x": 1}),
        write_folder(tmp_path / "f", b"\1" + large[1:], config={"x": 1}),
    ]

    revisions = [checkpoint_revision(folder) for folder in folders]

    assert len(set(revisions)) == len(folders)
    assert {len(revision) for revision in revisions} == {32}


def test_revision_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    one = write_folder(tmp_path / "a", config={"x": 1}, tokenizer={"y": 1})
    two = write_folder(tmp_path / "b", config={"x": 1}, tokenizer={"y": 2})

    assert checkpoint_revision(one) == checkpoint_revision(two)


def test_snapshot_of_the_hub_is_told_by_its_commit(tmp_path: Path) -> None:
    with_weights = write_folder(tmp_path / "a" / "snapshots" / "c0ffee", config={})
    without = write_folder(tmp_path / "b" / "snapshots" / "c0ffee", config={})
    (without / "model.safetensors").unlink()
    other = write_folder(tmp_path / "b" / "snapshots" / "beef", config={})

    assert checkpoint_revision(with_weights) == checkpoint_revision(without)
    assert checkpoint_revision(with_weights) != checkpoint_revision(other)


def test_image_settings_are_found_in_either_file(tmp_path: Path) -> None:
    old = write_folder(tmp_path / "a", preprocessor_config={"size": 1})
    new = write_folder(tmp_path / "b", processor_config={"image_processor": {"size": 2}})
    none = write_folder(tmp_path / "c")

    assert [image_processor_config(folder) for folder in (old, new, none)] == [{"size": 1}, {"size": 2}, {}]


def test_file_that_holds_no_object_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config=[1])

    with pytest.raises(ValueError, match=r"config\.json"):
        read_json(folder, "config.json")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"architectures": ["BertModel"]}}, True),
        ({"config": {"architectures": ["BertForMaskedLM"]}}, True),
        ({"config": {"architectures": ["LlamaForCausalLM"]}}, False),
        ({"config": {"architectures": ["LlavaForConditionalGeneration"]}}, False),
        ({"config": {"architectures": ["LlamaForCausalLM"]}, "modules": {}}, True),
        ({"config": {}}, False),
    ],
)
def test_a_folder_tells_whether_it_makes_vectors(tmp_path: Path, files: dict[str, object], expected: bool) -> None:
    assert makes_embeddings(write_folder(tmp_path, **files)) is expected


def test_the_smallest_limit_of_an_input_counts(tmp_path: Path) -> None:
    write_folder(tmp_path, config={"max_position_embeddings": 514}, tokenizer_config={"model_max_length": 1e30})
    assert max_input_tokens(tmp_path) == 514

    write_folder(tmp_path, tokenizer_config={"model_max_length": 512}, sentence_bert_config={"max_seq_length": 256})
    assert max_input_tokens(tmp_path) == 256
    assert max_input_tokens(tmp_path / "nowhere") == 0
