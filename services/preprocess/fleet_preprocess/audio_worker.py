"""The stage's engine for models that hear: a file in; mono samples and their facts out."""

from __future__ import annotations

import hashlib

from fleet_common.stage.port import Product
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_contracts.preprocess import MediaItem, PreprocessParams, PreprocessResult
from fleet_preprocess.core.audio import AudioLimits, decode_audio
from fleet_preprocess.file_worker import FileEngine

#: Samples per second that models hear.
RATE_HZ = 16_000

#: Where the file stood in the request.
FILE_PARAM = "file"


class AudioPreprocessEngine(FileEngine):
    """Decodes files. Implements `BatchEngine`."""

    route = "audio"

    def __init__(self, model: str, limits: AudioLimits, *, num_threads: int = 2, max_batch: int = 1) -> None:
        """
        Args:
            model: name under which clients ask for the model.
        """
        card = ModelCard(model=model, input_modalities=(Modality.AUDIO,), output_modalities=(Modality.AUDIO,))
        super().__init__(card, num_threads=num_threads, max_batch=max_batch)
        self._limits = limits

    def prepare(self, root: bytes, params: PreprocessParams) -> Product:
        audio = decode_audio(root, self._limits, RATE_HZ, param=FILE_PARAM)
        digest = hashlib.sha256(audio.samples.tobytes()).hexdigest()
        media = MediaItem(
            part=FILE_PARAM,
            kind="audio",
            width=0,
            height=0,
            mode="mono",
            sha256=digest,
            num_tokens=0,
            duration_s=audio.samples.shape[0] / RATE_HZ,
            sample_rate_hz=audio.sample_rate_hz,
            num_channels=audio.num_channels,
        )
        return Product(
            tensors={"audio0": audio.samples},
            result=PreprocessResult(num_prompt_tokens=0, media=(media,)),
            media=(media,),
            hashes={"audio0": digest},
        )
