"""The small local models: how each is converted, trained and put together."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fleet_models import audio, image_model, minilm, smollm2, vlm

PREPARE: Mapping[str, Callable[[Path, Callable[[str], None]], Path]] = {
    minilm.NAME: minilm.prepare_minilm,
    smollm2.NAME: smollm2.prepare_smollm2,
    vlm.NAME: vlm.prepare_vlm,
    audio.WHISPER_NAME: audio.prepare_whisper,
    audio.HIBARI_NAME: audio.prepare_hibari,
    image_model.NAME: image_model.prepare_image_model,
}


def prepare(name: str, cache: Path, progress: Callable[[str], None]) -> Path:
    """Make the model `name` ready under `cache` and return its folder; at once if it is ready already.

    Raises:
        KeyError: no such model; `PREPARE` lists them.
        FileNotFoundError: a package or weights that the model is made of are missing.
    """
    return PREPARE[name](cache, progress)


__all__ = ["PREPARE", "prepare"]
