"""A token engine without a model, for tests and load work: deterministic, fast, and able to fail on purpose."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fleet_common.errors import EngineDeadError, EngineError, InvalidInputError
from fleet_contracts.base import Modality
from fleet_decode.core.detokenize import ByteDetokenizer, Detokenizer
from fleet_decode.engine.port import Candidate, EngineModel, EngineRequest, EngineStep

_WORDS = ("amber", "cedar", "delta", "ember", "grove", "haven", "jetty", "maple", "ocean", "quartz", "ridge", "vista")
_NO_PROMPT = -1


class ScriptedArgs(BaseModel):
    """`engine_args` of the scripted engine.

    Every fault needs its own number; those that name a token id strike only prompts that contain it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pieces: tuple[str, ...] = Field((), description="Tokens of every answer, one piece each; empty: words.")
    pieces_hex: tuple[str, ...] = Field((), description="The same as hex bytes (parts of characters); wins.")
    num_tokens: int = Field(16, description="Tokens of an answer made of words.", ge=0)
    token_delay_s: float = Field(0.0, description="Wait before each token.", ge=0)
    first_token_delay_s: float = Field(0.0, description="Wait before the first one, in addition.", ge=0)
    tokens_per_step: int = Field(1, description="Tokens that arrive together.", ge=1)
    context_tokens: int = Field(8192, description="Prompt + output limit.", ge=2)
    hidden_size: int = Field(0, description="Width of image embeddings; 0: text only.", ge=0)
    media: tuple[Literal["image", "video", "audio"], ...] = Field(
        ("image", "video"), description="Kinds it takes, unless text only."
    )
    image_tokens: int = Field(0, description="Tokens per image, as reported.", ge=0)
    raise_after_tokens: int | None = Field(None, description="EngineError after that many tokens.")
    die_after_tokens: int | None = Field(None, description="The engine is dead after that many tokens.")
    load_s: float = Field(0.0, description="Time to load.", ge=0)
    fail_to_load: str = Field("", description="Why loading fails; empty: it does not.")
    enable_lora: bool = Field(False, description="Answers depend on the adapter a request names.")
    max_loras: int = Field(1, description="As vLLM has it.", ge=1)
    max_cpu_loras: int = Field(1, description="Adapters held.", ge=1)
    max_lora_rank: int = Field(16, description="As vLLM has it.", ge=1)
    exit_after_tokens: int | None = Field(None, description="The process ends at once after that many tokens.")
    fault_prompt_token: int = Field(_NO_PROMPT, description="Faults strike only prompts with that id; -1: all.")


class ScriptedVocabulary:
    """Ids count through the pieces; the last id ends an answer and has no text."""

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self._pieces = pieces
        self.eos_token_id = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.eos_token_id else b"<eos>"

    def _text_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.eos_token_id else b""

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._text_bytes)


class ScriptedEngine:
    """Says its pieces, or words that depend on the prompt, the images, the position and (when sampling) the seed.

    Args:
        engine_args: see `ScriptedArgs`.
    """

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        self._args = ScriptedArgs.model_validate(dict(engine_args))
        given = tuple(bytes.fromhex(piece) for piece in self._args.pieces_hex)
        given = given or tuple(piece.encode() for piece in self._args.pieces)
        self._is_fixed = bool(given)
        self._vocabulary = ScriptedVocabulary(given or tuple(f" {word}".encode() for word in _WORDS))
        self._running = 0
        self._is_alive = True
        # In the order of their last use.
        self._adapters: dict[str, None] = {}

    async def start(self) -> EngineModel:
        await asyncio.sleep(self._args.load_s)
        if self._args.fail_to_load:
            raise EngineDeadError(self._args.fail_to_load)
        return EngineModel(
            vocabulary=self._vocabulary,
            context_tokens=self._args.context_tokens,
            hidden_size=self._args.hidden_size,
            takes=tuple(Modality(kind) for kind in self._args.media) if self._args.hidden_size > 0 else (),
            image_tokens=self._args.image_tokens,
            revision="scripted",
            eos_token_ids=frozenset((self._vocabulary.eos_token_id,)),
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineStep, None]:
        if request.sampling.response_schema:
            raise InvalidInputError(
                "the scripted engine obeys no schema", param="response_schema", code="unsupported_parameter"
            )
        self._hold(request.adapter)
        self._running += 1
        try:
            await asyncio.sleep(self._args.first_token_delay_s)
            script = self._script(request)
            is_over = False
            position = request.num_resumed_tokens
            end = position + request.sampling.max_tokens
            while not is_over:
                step = script[position : min(end, position + self._args.tokens_per_step)]
                # Even without a delay: one sequence must not keep the loop from the others.
                await asyncio.sleep(self._args.token_delay_s * len(step))
                self._strike(request, position)
                position += len(step)
                reason = self._finish_reason(request, step, is_full=position >= end)
                is_over = reason is not None
                yield EngineStep(tuple(step), self._logprobs(request, step), reason, _stop_token(request, step, reason))
        finally:
            self._running -= 1

    def is_alive(self) -> bool:
        return self._is_alive

    def is_responsive(self) -> bool:
        return self._is_alive

    def running(self) -> int:
        return self._running

    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def _hold(self, adapter: str) -> None:
        if not adapter:
            return
        if not self._args.enable_lora:
            raise InvalidInputError("this model takes no adapters", param="model", code="adapter_unusable")
        self._adapters.pop(adapter, None)
        self._adapters[adapter] = None
        while len(self._adapters) > self._args.max_cpu_loras:
            del self._adapters[next(iter(self._adapters))]

    def kv_cache_usage_ratio(self) -> float:
        return 0.0

    async def close(self) -> None:
        self._is_alive = False

    def _script(self, request: EngineRequest) -> list[int]:
        """Ids of the whole answer, what an earlier attempt generated included."""
        sampling = request.sampling
        num_words = self._vocabulary.eos_token_id
        wanted = sampling.max_tokens + request.num_resumed_tokens
        length = num_words if self._is_fixed else self._args.num_tokens
        length = wanted if sampling.ignore_eos else min(wanted, max(length, sampling.min_tokens))
        if self._is_fixed:
            ids = [position % num_words for position in range(length)]
        else:
            seed = self._fingerprint(request)
            ids = [(seed + position * (seed % 7 + 1)) % num_words for position in range(length)]
        return ids if sampling.ignore_eos else [*ids, self._vocabulary.eos_token_id]

    def _fingerprint(self, request: EngineRequest) -> int:
        num_prompt = len(request.prompt_token_ids) - request.num_resumed_tokens
        seed = zlib.crc32(b"".join(i.to_bytes(4, "little") for i in request.prompt_token_ids[:num_prompt]))
        for image in request.images:
            seed = zlib.crc32(image.array.tobytes(), seed)
        seed = zlib.crc32(request.adapter.encode(), seed)
        if request.sampling.temperature > 0.0 and request.sampling.seed is not None:
            seed += request.sampling.seed
        return seed

    def _finish_reason(self, request: EngineRequest, step: list[int], *, is_full: bool) -> str | None:
        ends = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends.add(self._vocabulary.eos_token_id)
        for position, token_id in enumerate(step):
            if token_id in ends:
                del step[position + 1 :]
                return "stop"
        return "length" if is_full or not step else None

    def _logprobs(self, request: EngineRequest, step: list[int]) -> tuple[tuple[Candidate, ...], ...]:
        num_logprobs = request.sampling.num_logprobs
        if num_logprobs is None:
            return ()
        num_ids = self._vocabulary.eos_token_id + 1
        return tuple(
            (
                Candidate(token_id, -0.125),
                *(Candidate((token_id + rank) % num_ids, -0.125 - rank) for rank in range(num_logprobs)),
            )
            for token_id in step
        )

    def _strike(self, request: EngineRequest, position: int) -> None:
        args = self._args
        if not self._is_alive:
            raise EngineDeadError("the scripted engine is dead")
        if args.fault_prompt_token != _NO_PROMPT and args.fault_prompt_token not in request.prompt_token_ids:
            return
        if args.exit_after_tokens is not None and position >= args.exit_after_tokens:
            os._exit(137)
        if args.die_after_tokens is not None and position >= args.die_after_tokens:
            self._is_alive = False
            raise EngineDeadError("the scripted engine died as told")
        if args.raise_after_tokens is not None and position >= args.raise_after_tokens:
            raise EngineError("the scripted engine failed as told")


def _stop_token(request: EngineRequest, step: list[int], reason: str | None) -> int | None:
    if reason == "stop" and step and step[-1] in request.sampling.stop_token_ids:
        return step[-1]
    return None
