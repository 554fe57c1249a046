"""vLLM's AsyncLLM behind the token engine's port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from fleet_common.checkpoints import locate_checkpoint
from fleet_common.errors import EngineDeadError, EngineError, InvalidInputError
from fleet_decode.core.placeholders import collapse, replace_some
from fleet_decode.core.sampling import Sampling
from fleet_decode.engine.adapters import Adapters
from fleet_decode.engine.families import DecodeFamily
from fleet_decode.engine.port import Candidate, EngineModel, EngineRequest, EngineStep, ImageEmbeds
from fleet_decode.engine.thread import DaemonThread
from fleet_decode.engine.tokens import TokenizerVocabulary
from fleet_decode.engine.vllm_arguments import ModelFacts, engine_arguments, model_facts

log = structlog.get_logger()

#: vLLM's engine core answers questions between two steps; one that is silent for this long is stuck.
_STALL_S = 10.0
_PING_S = 2.0
#: Nothing runs any more when the engine is closed: its core may be killed when it takes its time.
_SHUTDOWN_S = 1.0
_STOP_LOADING_S = 4.0
_STOP_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What exists once the engine has started."""

    llm: Any
    model: EngineModel
    facts: ModelFacts


class VllmEngine:
    """Sequences of one model. The process must have been started with `decode_environment`.

    Args:
        model_path: folder or Hugging Face id.
        slots: default of `max_num_seqs`.
        engine_args: passed to `AsyncEngineArgs` untouched; what is not named there gets this service's defaults.
        adapters_dir: its entries are LoRA adapters (with `enable_lora` among the arguments).
    """

    def __init__(
        self, model_path: str, *, slots: int, engine_args: Mapping[str, Any], adapters_dir: Path | None = None
    ) -> None:
        self._model_path = model_path
        self._slots = slots
        self._engine_args = dict(engine_args)
        has_adapters = bool(self._engine_args.get("enable_lora"))
        max_held = self._engine_args.get("max_cpu_loras") or self._engine_args.get("max_loras") or 1
        self._adapters = Adapters(adapters_dir if has_adapters else None, int(max_held))
        # The engine core dies with the thread that started it (guard/sitecustomize.py): this one lives as long.
        self._starter = DaemonThread("vllm-start")
        self._loaded: _Loaded | None = None
        self._is_loading = False
        self._running = 0
        self._num_kv_tokens = 0
        self._heard_s = 0.0
        self._pinger: asyncio.Task[None] | None = None

    async def start(self) -> EngineModel:
        begun_s = time.monotonic()
        try:
            # On its own: errors of optional imports, which libraries keep, keep the frames they passed through.
            await self._starter.run(_import_vllm)
            imported_s = time.monotonic()
            self._loaded = await self._starter.run(self._load)
        except (RuntimeError, ValueError, TypeError, OSError, ImportError, TimeoutError) as err:
            raise EngineDeadError(f"vLLM could not load {self._model_path!r}: {err}") from err
        # What is alive now stays: a full collection over it would stop the loop for a second.
        gc.freeze()
        self._heard_s = time.monotonic()
        log.info(
            "vllm_started",
            model=self._model_path,
            import_s=round(imported_s - begun_s, 3),
            load_s=round(self._heard_s - imported_s, 3),
        )
        self._pinger = asyncio.create_task(self._ping(self._loaded.llm))
        return self._loaded.model

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineStep, None]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        loaded = self._started()
        num_logprobs = request.sampling.num_logprobs
        num_tokens = len(request.prompt_token_ids)
        has_begun = False
        self._running += 1
        self._num_kv_tokens += num_tokens
        try:
            adapter = await self._adapters.load(loaded.llm, request.adapter) if request.adapter else None
            prompt = await self._prompt(loaded, request)
            stream = loaded.llm.generate(
                prompt, _sampling_params(request.sampling), request.request_id, lora_request=adapter
            )
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    self._heard_s = time.monotonic()
                    _check_grammar(output, request.sampling, has_begun=has_begun)
                    has_begun = True
                    step = _step(output, num_logprobs)
                    num_tokens += len(step.token_ids)
                    self._num_kv_tokens += len(step.token_ids)
                    yield step
        except VllmDeadError as err:
            raise EngineDeadError("vLLM's engine core is dead") from err
        except VLLMClientError as err:
            raise _refusal(err, request.sampling) from err
        except EngineGenerateError as err:
            if request.sampling.response_schema and isinstance(err.__cause__, VLLMClientError | ValueError):
                raise _schema_refusal(err.__cause__) from err
            raise EngineError(f"vLLM failed on this sequence: {err.__cause__ or err}") from err
        finally:
            self._running -= 1
            self._num_kv_tokens -= num_tokens

    def is_alive(self) -> bool:
        return self._loaded is not None and not self._loaded.llm.errored

    def is_responsive(self) -> bool:
        return self.is_alive() and not self._is_stalled()

    def running(self) -> int:
        return self._running

    def adapters(self) -> tuple[str, ...]:
        return self._adapters.held()

    def kv_cache_usage_ratio(self) -> float:
        """By the tokens of the sequences here: vLLM's own figure would cost statistics at every step."""
        if self._loaded is None:
            return 0.0
        cache = self._loaded.llm.vllm_config.cache_config
        num_slots: int = (cache.num_gpu_blocks or 0) * cache.block_size
        return min(1.0, self._num_kv_tokens / max(1, num_slots))

    async def close(self) -> None:
        pinger, self._pinger = self._pinger, None
        loaded, self._loaded = self._loaded, None
        if pinger is not None:
            await _cancelled(pinger)
        if loaded is not None:
            # First, or it takes the engine core's orderly end for a crash.
            if loaded.llm.output_handler is not None:
                await _cancelled(loaded.llm.output_handler)
            await self._starter.run(partial(loaded.llm.shutdown, timeout=_SHUTDOWN_S))
            del loaded
        elif self._is_loading:
            await self._stop_loading()
        gc.unfreeze()
        self._starter.stop()

    async def _stop_loading(self) -> None:
        """The thread cannot be interrupted, but it gives up when the process it waits for is gone."""
        deadline_s = time.monotonic() + _STOP_LOADING_S
        while self._is_loading and time.monotonic() < deadline_s:
            for child in multiprocessing.active_children():
                child.kill()
            await asyncio.sleep(_STOP_POLL_S)

    def _started(self) -> _Loaded:
        if self._loaded is None:
            raise EngineDeadError("vLLM is not running")
        return self._loaded

    def _load(self) -> _Loaded:
        """Configure and start the engine core. Runs in the starter thread: seconds to minutes."""
        from vllm.exceptions import VLLMError

        self._is_loading = True
        try:
            return self._load_now()
        except VLLMError as err:
            raise EngineDeadError(f"vLLM could not load {self._model_path!r}: {err}") from err
        finally:
            self._is_loading = False

    def _load_now(self) -> _Loaded:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        # vLLM fetches the rest of a Hugging Face id itself.
        facts = model_facts(locate_checkpoint(self._model_path, ("*.json",)))
        arguments = engine_arguments(
            self._model_path,
            slots=self._slots,
            facts=facts,
            is_cpu=current_platform.is_cpu(),
            given=self._engine_args,
        )
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=bool(arguments["disable_log_stats"]))
        return _Loaded(llm=llm, model=_engine_model(llm, facts), facts=facts)

    async def _prompt(self, loaded: _Loaded, request: EngineRequest) -> Any:
        from vllm.inputs import TokensPrompt
        from vllm.inputs.engine import tokens_input

        salt = request.cache_salt or None
        if not request.images:
            # Rendered already: vLLM needs no thread for it.
            return tokens_input(list(request.prompt_token_ids), cache_salt=salt)
        family = loaded.facts.family
        if family is None:
            raise InvalidInputError("this model takes no media")
        data: dict[str, Any] = {}
        uuids: dict[str, list[str | None]] = {}
        for kind in dict.fromkeys(family.handed_as(one.kind) for one in request.images):
            embeds = [one for one in request.images if family.handed_as(one.kind) == kind]
            tensors = [_tensor(one, loaded.llm.model_config.dtype) for one in embeds]
            data[kind] = family.media_data(kind, embeds, tensors)
            uuids[kind] = [one.content_hash or None for one in embeds]
        ids = _placed(request, loaded.facts, family)
        prompt = TokensPrompt(prompt_token_ids=ids, multi_modal_data=data, multi_modal_uuids=uuids)
        if salt is not None:
            prompt["cache_salt"] = salt
        try:
            (rendered,) = await loaded.llm.renderer.render_cmpl_async([prompt])
        except ValueError as err:
            raise InvalidInputError(f"vLLM refused the media: {err}") from err
        return rendered

    async def _ping(self, llm: Any) -> None:
        """Ask the engine core something small, again and again: only a live and running one answers."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        while True:
            try:
                await llm.is_paused()
            except VllmDeadError:
                log.error("vllm_engine_core_died", model=self._model_path)
                return
            self._heard_s = time.monotonic()
            await asyncio.sleep(_PING_S)

    def _is_stalled(self) -> bool:
        return time.monotonic() - self._heard_s > _STALL_S


def _placed(request: EngineRequest, facts: ModelFacts, family: DecodeFamily) -> list[int]:
    """The prompt with one token for every medium, that of its kind to vLLM."""
    ids = list(request.prompt_token_ids)
    for token_id in dict.fromkeys(facts.token_id(one.kind) for one in request.images):
        here = [one for one in request.images if facts.token_id(one.kind) == token_id]
        ids = collapse(ids, token_id, [one.array.shape[0] for one in here])
        if facts.video_token_id is not None:
            is_video = [family.handed_as(one.kind) == "video" for one in here]
            ids = replace_some(ids, token_id, facts.video_token_id, is_video)
    return ids


def _import_vllm() -> None:
    import vllm.v1.engine.async_llm  # noqa: F401


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; an error it ended with was logged by it."""
    task.cancel()
    await asyncio.wait((task,))


def _engine_model(llm: Any, facts: ModelFacts) -> EngineModel:
    model_config = llm.model_config
    tokenizer = llm.get_tokenizer()
    if not tokenizer.is_fast:
        raise ValueError("only models with a tokenizer.json are served")
    ends = model_config.try_get_generation_config().get("eos_token_id")
    eos = {ends} if isinstance(ends, int) else set(ends or ())
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    return EngineModel(
        vocabulary=TokenizerVocabulary(tokenizer.backend_tokenizer),
        context_tokens=model_config.max_model_len,
        hidden_size=model_config.get_hidden_size(),
        takes=facts.takes,
        image_tokens=facts.image_tokens,
        revision=facts.revision,
        eos_token_ids=frozenset(eos),
    )


def _refusal(err: Exception, sampling: Sampling) -> InvalidInputError:
    """vLLM's refusal; it names a parameter of ours, or means the schema."""
    from vllm.exceptions import VLLMValidationError

    param = err.parameter if isinstance(err, VLLMValidationError) else None
    if param is None and sampling.response_schema:
        return _schema_refusal(err)
    message = err.args[0] if err.args else "vLLM refused the request"
    return InvalidInputError(str(message), param=param if param in sampling.__slots__ else None)


def _schema_refusal(err: BaseException) -> InvalidInputError:
    reason = str(err.args[0] if err.args else err)[:500]
    return InvalidInputError(
        f"the engine cannot hold an answer to this schema: {reason}", param="response_schema", code="invalid_schema"
    )


def _check_grammar(output: Any, sampling: Sampling, *, has_begun: bool) -> None:
    """A grammar that cannot be compiled ends a sequence before its first token: that is the schema's fault."""
    (sequence,) = output.outputs
    if sampling.response_schema and not has_begun and sequence.finish_reason == "error" and not sequence.token_ids:
        raise _schema_refusal(ValueError("its grammar does not compile"))


def _sampling_params(sampling: Sampling) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    grammar = StructuredOutputsParams(json=sampling.response_schema) if sampling.response_schema else None
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.num_logprobs,
        logit_bias=dict(sampling.logit_bias) or None,
        structured_outputs=grammar,
        # Text and stop strings are made in core/: a continued stream needs their state.
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _step(output: Any, num_logprobs: int | None) -> EngineStep:
    (sequence,) = output.outputs
    if sequence.finish_reason not in (None, "stop", "length"):
        raise EngineError(f"vLLM ended the sequence: {sequence.finish_reason}")
    token_ids = tuple(sequence.token_ids)
    logprobs: tuple[tuple[Candidate, ...], ...] = ()
    if num_logprobs is not None:
        rows = zip(token_ids, sequence.logprobs or (), strict=True)
        logprobs = tuple(_candidates(token_id, row, num_logprobs) for token_id, row in rows)
    return EngineStep(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_reason if isinstance(sequence.stop_reason, int) else None,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _candidates(token_id: int, row: Any, num_logprobs: int) -> tuple[Candidate, ...]:
    """Chosen token first, then the best `num_logprobs` by rank: the chosen one is among them when it ranks."""
    ranked = sorted(((entry.rank, other) for other, entry in row.items() if entry.rank <= num_logprobs))
    return (
        Candidate(token_id, row[token_id].logprob),
        *(Candidate(other, row[other].logprob) for _, other in ranked),
    )


def _tensor(image: ImageEmbeds, dtype: Any) -> Any:
    """A tensor of its own: vLLM may still be sending it when the runner gives the view back."""
    import numpy as np
    import torch

    array = np.array(image.array)
    if image.dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(array).to(dtype)
