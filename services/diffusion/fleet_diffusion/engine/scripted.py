"""A model without weights: pixels follow from prompt, seed and steps. For tests and load work, never the default."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet_common.errors import EngineError, EngineOutOfMemoryError
from fleet_diffusion.core.canvas import num_steps_from
from fleet_diffusion.core.limits import ModelFacts
from fleet_diffusion.engine.port import Parts, PictureInWork, PictureRequest

_SIZE_STEP_PX = 8


@dataclass(slots=True)
class ScriptedPicture:
    """A picture in work. Each step mixes its state: what is missed or done twice shows in the pixels."""

    request: PictureRequest
    state: npt.NDArray[np.uint32] | None
    num_steps: int
    num_prompt_tokens: int
    was_cached: bool
    index: int = 0


class ScriptedModel:
    """Equal requests give equal pictures, other requests give others."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        """
        Args:
            engine_args: `cost_s` seconds per pass (0), `cost_picture_s` more per picture in it (0), `fail_prompts`
                prompts whose steps raise EngineError, `max_pictures` a pass may hold before memory is out (0: any),
                `takes_images` false for a model that cannot edit.
        """
        self._cost_s = float(engine_args.get("cost_s", 0.0))
        self._cost_picture_s = float(engine_args.get("cost_picture_s", 0.0))
        self._fail_prompts = frozenset(engine_args.get("fail_prompts", ()))
        self._max_pictures = int(engine_args.get("max_pictures", 0))
        self._takes_images = bool(engine_args.get("takes_images", True))
        self._known: set[tuple[str, str]] = set()

    def load(self) -> ModelFacts:
        return ModelFacts(
            revision="scripted-1",
            default_width=64,
            default_height=64,
            size_step=_SIZE_STEP_PX,
            default_steps=10,
            default_guidance=3.0,
            takes_images=self._takes_images,
        )

    def begin(self, request: PictureRequest) -> ScriptedPicture:
        key = (request.tenant, request.prompt)
        was_cached = key in self._known
        self._known.add(key)
        digest = hashlib.sha256(f"{request.prompt}\0{request.negative_prompt}\0{request.seed}".encode())
        num_steps, canvas = request.num_steps, request.canvas
        if canvas is not None:
            num_steps = num_steps_from(num_steps, canvas.strength)
            digest.update(canvas.pixels.tobytes())
        state = np.frombuffer(digest.digest()[:16], np.uint32).copy()
        return ScriptedPicture(request, state, num_steps, len(request.prompt.split()), was_cached)

    def step(self, pictures: Sequence[PictureInWork]) -> None:
        mine = [_own(picture) for picture in pictures]
        if self._max_pictures and len(mine) > self._max_pictures:
            raise EngineOutOfMemoryError(f"{len(mine)} pictures do not fit")
        if any(picture.request.prompt in self._fail_prompts for picture in mine):
            raise EngineError("scripted failure")
        if self._cost_s or self._cost_picture_s:
            time.sleep(self._cost_s + self._cost_picture_s * len(mine))
        for picture in mine:
            if picture.state is None:
                raise EngineError("the picture is taken out")
            picture.index += 1
            picture.state = picture.state * np.uint32(2654435761) + np.uint32(picture.index)

    def pixels(self, picture: PictureInWork) -> npt.NDArray[np.uint8]:
        mine = _own(picture)
        if mine.state is None:
            raise EngineError("the picture is taken out")
        request = mine.request
        # As many values as a colour and a pattern need: the file stays small.
        tile = np.frombuffer(mine.state.tobytes()[:12], np.uint8).reshape(2, 2, 3)
        repeats = (request.height // 2 + 1, request.width // 2 + 1, 1)
        return np.ascontiguousarray(np.tile(tile, repeats)[: request.height, : request.width])

    def take_out(self, picture: PictureInWork) -> Parts:
        mine = _own(picture)
        if mine.state is None:
            return {}
        state, mine.state = mine.state, None
        return {"latents": state}

    def put_back(self, picture: PictureInWork, parts: Parts) -> None:
        _own(picture).state = np.array(parts["latents"])


def _own(picture: PictureInWork) -> ScriptedPicture:
    if not isinstance(picture, ScriptedPicture):
        raise EngineError(f"a picture of another engine: {type(picture).__name__}")
    return picture
