"""Pipelines of diffusers, taken apart: one pass of the denoiser for pictures that are each at a step of their own."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import is_accelerate_available
from diffusers.utils import logging as diffusers_logging
from diffusers.utils.torch_utils import randn_tensor
from transformers.utils import logging as transformers_logging

from fleet_common.checkpoints import checkpoint_revision, locate_checkpoint, read_json
from fleet_common.errors import EngineError, EngineOutOfMemoryError, InvalidInputError
from fleet_diffusion.core.cache import ByteCache
from fleet_diffusion.core.limits import ModelFacts
from fleet_diffusion.engine.families import FAMILIES, Condition, Family, Rows
from fleet_diffusion.engine.latents import Known, can_encode, from_canvas, from_noise, unscaled, with_known
from fleet_diffusion.engine.port import Parts, PictureInWork, PictureRequest

_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model")
#: What torch's CPU allocator says; it raises a plain RuntimeError.
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
_DTYPE_ARGS = ("torch_dtype", "dtype")
#: Before the names of what a mask keeps, among the parts of a picture.
_KNOWN = "known/"


@dataclass(slots=True)
class DiffusersPicture:
    """One picture in work: it owns its scheduler and its random numbers, so nobody else's steps can touch it.

    Attributes:
        latents: [1, channels, height / factor, width / factor]; None while taken out.
        positive, negative: conditioning [1, ...] by argument of the denoiser.
        step_args: what the scheduler's `step` takes besides.
        known: of an edit with a mask: what stays as it is.
        index: steps done.
        kept_dtypes: of the parts taken out.
    """

    request: PictureRequest
    scheduler: Any
    timesteps: torch.Tensor
    latents: torch.Tensor | None
    positive: Rows
    negative: Rows
    step_args: Mapping[str, Any]
    num_prompt_tokens: int
    was_cached: bool
    known: Known | None = None
    index: int = 0
    kept_dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def is_guided(self) -> bool:
        return self.request.guidance > 1.0


class DiffusersModel:
    """A pipeline of a supported class. Implements `PictureModel`."""

    def __init__(
        self, name_or_path: str, engine_args: Mapping[str, Any], *, num_threads: int, cache_bytes: int
    ) -> None:
        """
        Args:
            name_or_path: folder in diffusers' layout, or Hugging Face id.
            engine_args: `device` ("cpu"); the rest goes to `DiffusionPipeline.from_pretrained` (`torch_dtype` by name).
            num_threads: compute threads of torch in this process.
            cache_bytes: of prompts' conditioning.
        """
        more = dict(engine_args)
        self._device = torch.device(more.pop("device", "cpu"))
        # JSON knows no types of torch.
        self._load_args = {
            name: getattr(torch, value) if name in _DTYPE_ARGS and isinstance(value, str) else value
            for name, value in more.items()
        }
        self._name_or_path = name_or_path
        self._num_threads = num_threads
        self._conditions: ByteCache[tuple[Condition, int]] = ByteCache(cache_bytes)
        self._pipe: Any = None
        self._family: Family | None = None

    def load(self) -> ModelFacts:
        torch.set_num_threads(self._num_threads)
        folder = locate_checkpoint(self._name_or_path, _PATTERNS)
        name = read_json(folder, "model_index.json").get("_class_name")
        family = FAMILIES.get(str(name))
        if family is None:
            raise ValueError(f"pipelines of class {name!r} are not supported; there are {', '.join(sorted(FAMILIES))}")
        # Logs are lines of JSON.
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        # Only safetensors: other weights are pickles.
        defaults = {"use_safetensors": True, "low_cpu_mem_usage": is_accelerate_available()}
        pipe = DiffusionPipeline.from_pretrained(folder, **{**defaults, **self._load_args})
        self._pipe = pipe.to(self._device)
        self._pipe.set_progress_bar_config(disable=True)
        self._family = family(self._pipe)
        if self._pipe.vae.config.get("force_upcast") and self._pipe.vae.dtype == torch.float16:
            self._pipe.vae.to(torch.float32)  # it overflows in float16
        call = inspect.signature(pipe.__call__).parameters
        width, height = self._default_size()
        return ModelFacts(
            revision=_revision(folder),
            default_width=width,
            default_height=height,
            size_step=self._family.size_step,
            default_steps=int(call["num_inference_steps"].default),
            default_guidance=float(call["guidance_scale"].default),
            takes_images=can_encode(self._pipe, self._family.denoiser.config.in_channels),
        )

    def begin(self, request: PictureRequest) -> DiffusersPicture:
        with torch.inference_mode():
            return self._begin(self._loaded(), request)

    def step(self, pictures: Sequence[PictureInWork]) -> None:
        with torch.inference_mode():
            self._step([_own(picture) for picture in pictures])

    def pixels(self, picture: PictureInWork) -> npt.NDArray[np.uint8]:
        with torch.inference_mode():
            return self._pixels(_own(picture))

    def take_out(self, picture: PictureInWork) -> Parts:
        mine = _own(picture)
        parts: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in _tensors_of(mine).items():
            mine.kept_dtypes[name] = tensor.dtype
            # numpy knows no bfloat16; float32 holds every value of it.
            plain = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
            parts[name] = np.ascontiguousarray(plain.cpu().numpy())
            _set_tensor(mine, name, None)
        return parts

    def put_back(self, picture: PictureInWork, parts: Parts) -> None:
        mine = _own(picture)
        for name, array in parts.items():
            tensor = torch.from_numpy(np.array(array)).to(self._device, mine.kept_dtypes[name])
            _set_tensor(mine, name, tensor)

    def _begin(self, family: Family, request: PictureRequest) -> DiffusersPicture:
        condition, num_tokens, was_cached = self._condition(family, request)
        scheduler = type(self._pipe.scheduler).from_config(self._pipe.scheduler.config)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        factor = self._pipe.vae_scale_factor
        shape = (1, family.denoiser.config.in_channels, request.height // factor, request.width // factor)
        scheduler.set_timesteps(request.num_steps, device=self._device, **_shift(scheduler, family.denoiser, shape))
        dtype = condition.positive["encoder_hidden_states"].dtype
        if request.canvas is None:
            start = from_noise(scheduler, randn_tensor(shape, generator=generator, device=self._device, dtype=dtype))
        else:
            like = torch.empty(shape, device=self._device, dtype=dtype)
            start = from_canvas(self._pipe, scheduler, request.canvas, request.num_steps, generator, like)
        return DiffusersPicture(
            request=request,
            scheduler=scheduler,
            timesteps=start.timesteps,
            latents=start.latents,
            known=start.known,
            positive=family.with_size(condition.positive, request.width, request.height),
            negative=family.with_size(condition.negative, request.width, request.height),
            step_args=_step_args(scheduler, generator),
            num_prompt_tokens=num_tokens,
            was_cached=was_cached,
        )

    def _step(self, mine: Sequence[DiffusersPicture]) -> None:
        try:
            predictions = self._predict(mine)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise EngineOutOfMemoryError(f"{len(mine)} pictures do not fit") from error
        except RuntimeError as error:
            if _CPU_OUT_OF_MEMORY in str(error):
                raise EngineOutOfMemoryError(f"{len(mine)} pictures do not fit") from error
            raise
        for picture, prediction in zip(mine, predictions, strict=True):
            assert picture.latents is not None
            time = picture.timesteps[picture.index]
            # Some schedulers compute in float32 whatever they are given.
            made = picture.scheduler.step(prediction, time, picture.latents, return_dict=False, **picture.step_args)[0]
            picture.latents = made.to(picture.latents.dtype)
            picture.index += 1
            if picture.known is not None:
                has_next = picture.index < picture.num_steps
                next_time = picture.timesteps[picture.index] if has_next else None
                picture.latents = with_known(picture.scheduler, picture.latents, picture.known, next_time)

    def _pixels(self, picture: DiffusersPicture) -> npt.NDArray[np.uint8]:
        latents = picture.latents
        if latents is None:
            raise EngineError("the picture is taken out")
        pipe = self._pipe
        decoded = pipe.vae.decode(unscaled(pipe.vae, latents).to(pipe.vae.dtype), return_dict=False)[0]
        if getattr(pipe, "safety_checker", None) is not None:
            decoded, is_flagged = pipe.run_safety_checker(decoded, self._device, latents.dtype)
            if is_flagged and any(is_flagged):
                raise InvalidInputError(
                    "The model's safety checker refused the picture.", param="prompt", code="content_policy_violation"
                )
        (image,) = pipe.image_processor.postprocess(decoded, output_type="np")
        made: npt.NDArray[np.uint8] = (image * 255).round().astype(np.uint8)
        return made

    def _loaded(self) -> Family:
        if self._family is None:
            raise EngineError("the model is not loaded")
        return self._family

    def _default_size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        size = self._loaded().denoiser.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return width * self._pipe.vae_scale_factor, height * self._pipe.vae_scale_factor

    def _condition(self, family: Family, request: PictureRequest) -> tuple[Condition, int, bool]:
        """Conditioning, tokens of the prompt, and whether it was known."""
        key = (request.tenant, request.prompt, request.negative_prompt)
        known = self._conditions.get(key)
        if known is not None:
            return (*known, True)
        num_tokens = _checked_tokens(family, request.prompt, "prompt")
        _checked_tokens(family, request.negative_prompt, "negative_prompt")
        condition = family.encode(request.prompt, request.negative_prompt)
        self._conditions.put(key, (condition, num_tokens), condition.nbytes)
        return condition, num_tokens, False

    def _predict(self, pictures: Sequence[DiffusersPicture]) -> list[torch.Tensor]:
        """The denoiser's word for each [1, channels, h, w], guidance applied."""
        guided = [picture for picture in pictures if picture.is_guided]
        rows = [*pictures, *guided]
        conditions = [picture.positive for picture in pictures] + [picture.negative for picture in guided]
        latents = torch.cat([_scaled_input(picture) for picture in rows])
        timesteps = torch.stack([picture.timesteps[picture.index] for picture in rows])
        together = {name: torch.cat([condition[name] for condition in conditions]) for name in conditions[0]}
        made = self._loaded().predict(latents, timesteps, together)
        unwanted = iter(made[len(pictures) :].split(1))
        predictions = []
        for picture, wanted in zip(pictures, made[: len(pictures)].split(1), strict=True):
            if picture.is_guided:
                base = next(unwanted)
                wanted = base + picture.request.guidance * (wanted - base)
            predictions.append(wanted)
        return predictions


def _revision(folder: Path) -> str:
    """32 hex digits that change when any component does."""
    digest = hashlib.sha256((folder / "model_index.json").read_bytes())
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        digest.update(f"{part.name}\0{checkpoint_revision(part)}\0".encode())
    return digest.hexdigest()[:32]


def _own(picture: PictureInWork) -> DiffusersPicture:
    if not isinstance(picture, DiffusersPicture):
        raise EngineError(f"a picture of another engine: {type(picture).__name__}")
    return picture


def _checked_tokens(family: Family, text: str, param: str) -> int:
    """Tokens of a text. Raises InvalidInputError: an encoder would cut what is too long, and say nothing."""
    num_tokens = len(family.tokenizer(text, truncation=False, verbose=False).input_ids)
    if num_tokens > family.max_tokens:
        raise InvalidInputError(
            f"The model takes {family.max_tokens} tokens, this text has {num_tokens}.",
            param=param,
            code="context_length_exceeded",
        )
    return num_tokens


def _shift(scheduler: Any, denoiser: Any, shape: tuple[int, ...]) -> dict[str, float]:
    """`mu` of schedulers whose noise levels depend on the number of patches, as the SD3 pipeline has it."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return {}
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    num_patches = (shape[2] // denoiser.config.patch_size) * (shape[3] // denoiser.config.patch_size)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return {"mu": calculate_shift(num_patches, **{_SHIFT_ARGS[n]: config[n] for n in names if config.get(n)})}


_SHIFT_ARGS = {
    "base_image_seq_len": "base_seq_len",
    "max_image_seq_len": "max_seq_len",
    "base_shift": "base_shift",
    "max_shift": "max_shift",
}


def _step_args(scheduler: Any, generator: torch.Generator) -> dict[str, Any]:
    takes_generator = "generator" in inspect.signature(scheduler.step).parameters
    return {"generator": generator} if takes_generator else {}


def _scaled_input(picture: DiffusersPicture) -> torch.Tensor:
    if picture.latents is None:
        raise EngineError("the picture is taken out")
    scale = getattr(picture.scheduler, "scale_model_input", None)
    time = picture.timesteps[picture.index]
    made: torch.Tensor = picture.latents if scale is None else scale(picture.latents, time)
    return made


def _tensors_of(picture: DiffusersPicture) -> dict[str, torch.Tensor]:
    """The latents, what a mask keeps, and what the scheduler remembers of earlier steps: all of the latents' shape."""
    if picture.latents is None:
        return {}
    found = {"latents": picture.latents}
    if picture.known is not None:
        found |= {f"{_KNOWN}{name}": getattr(picture.known, name) for name in Known.__slots__}
    for name, value in vars(picture.scheduler).items():
        values = value if isinstance(value, list) else [value]
        for position, tensor in enumerate(values):
            if isinstance(tensor, torch.Tensor) and tensor.shape == picture.latents.shape:
                found[f"{name}.{position}" if isinstance(value, list) else name] = tensor
    return found


def _set_tensor(picture: DiffusersPicture, name: str, tensor: torch.Tensor | None) -> None:
    if name == "latents":
        picture.latents = tensor
        return
    if name.startswith(_KNOWN):
        setattr(picture.known, name.removeprefix(_KNOWN), tensor)
        return
    attribute, _, position = name.partition(".")
    if position:
        getattr(picture.scheduler, attribute)[int(position)] = tensor
    else:
        setattr(picture.scheduler, attribute, tensor)
