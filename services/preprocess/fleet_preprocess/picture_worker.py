"""The stage's engine for models that edit pictures: picture files in; arrays of the size asked for out."""

from __future__ import annotations

import numpy as np
from PIL import Image

from fleet_common.errors import ContractError, InvalidInputError
from fleet_common.stage.port import Product
from fleet_common.tensors.port import Array
from fleet_contracts import codec
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_contracts.preprocess import MediaItem, PreprocessParams, PreprocessResult
from fleet_preprocess.core.hashing import pixel_digest
from fleet_preprocess.core.images import RgbArray, decode_image, decode_mask
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.file_worker import FileEngine

MASK_PARAM = "mask"


class PicturePreprocessEngine(FileEngine):
    """Decodes and scales pictures. Implements `BatchEngine`."""

    route = "edit"

    def __init__(self, model: str, limits: MediaLimits, *, num_threads: int = 2, max_batch: int = 1) -> None:
        """
        Args:
            model: name under which clients ask for the model.
        """
        card = ModelCard(model=model, input_modalities=(Modality.IMAGE,), output_modalities=(Modality.IMAGE,))
        super().__init__(card, num_threads=num_threads, max_batch=max_batch)
        self._limits = limits

    def prepare(self, root: bytes, params: PreprocessParams) -> Product:
        size = (params.width, params.height)
        try:
            files = codec.decode_edit_files(root)
        except codec.DecodeError as error:
            raise ContractError("the root holds no files to edit") from error
        if min(size) < 1 or not files.images:
            raise ContractError("an edit needs a size and a picture")
        tensors: dict[str, Array] = {}
        media: list[MediaItem] = []
        first: RgbArray | None = None
        for number, data in enumerate(files.images):
            param = f"image[{number}]" if len(files.images) > 1 else "image"
            rgb = decode_image(data, self._limits, param=param)
            first = rgb if first is None else first
            scaled = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS))
            tensors[f"image{number}"] = np.ascontiguousarray(scaled)
            media.append(_item(param, "image", rgb, scaled))
        if files.mask:
            assert first is not None
            mask = self._mask(files.mask, first.shape[:2])
            # A pixel of the answer may change when any of what it covers may.
            scaled = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.BOX)) > 0
            made = np.ascontiguousarray(scaled, dtype=np.uint8)
            tensors["mask"] = made
            media.append(_item(MASK_PARAM, "mask", mask, made))
        hashes = {name: item.sha256 for name, item in zip(tensors, media, strict=True)}
        result = PreprocessResult(num_prompt_tokens=0, media=tuple(media))
        return Product(tensors=tensors, result=result, media=tuple(media), hashes=hashes)

    def _mask(self, data: bytes, shape: tuple[int, ...]) -> RgbArray:
        mask = decode_mask(data, self._limits, param=MASK_PARAM)
        if mask.shape != shape:
            raise InvalidInputError(
                f"the mask is {mask.shape[1]}x{mask.shape[0]} pixels, the picture {shape[1]}x{shape[0]}",
                param=MASK_PARAM,
                code="mask_size_mismatch",
            )
        if not mask.any():
            raise InvalidInputError("the mask leaves nothing to change", param=MASK_PARAM, code="empty_mask")
        return mask


def _item(part: str, kind: str, source: RgbArray, made: RgbArray) -> MediaItem:
    return MediaItem(
        part=part,
        kind=kind,
        width=made.shape[1],
        height=made.shape[0],
        mode="RGB" if kind == "image" else "1",
        sha256=pixel_digest(made),
        num_tokens=0,
        source_width=source.shape[1],
        source_height=source.shape[0],
    )
