"""Decode as the stage runner sees it: a step in, every choice streamed to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fleet_common.errors import CancelledWorkError, EngineDeadError, EngineError, InvalidInputError
from fleet_common.stage.port import StepItem, TokenSink
from fleet_common.tensors.port import Array
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_contracts.decode import DecodeParams, TokenAlternative, TokenLogprob
from fleet_contracts.events import Usage
from fleet_contracts.preprocess import MediaItem, PreprocessResult
from fleet_decode.core.choice import Choice
from fleet_decode.core.continuation import Route, route
from fleet_decode.core.sampling import choice_sampling, end_token_ids, token_budget
from fleet_decode.engine.port import Candidate, EngineModel, EngineRequest, ImageEmbeds, TokenEngine, Vocabulary

#: How long a cancelled request may go on when the engine gives no tokens (it waits for room, or hangs).
_CANCEL_POLL_S = 0.1


@dataclass(slots=True)
class _Job:
    """One request being decoded."""

    params: DecodeParams
    prompt: tuple[int, ...]
    num_prompt_tokens: int
    images: tuple[ImageEmbeds, ...]
    budget_tokens: int
    cache_salt: str
    name: str
    sink: TokenSink
    num_tokens: list[int] = field(default_factory=list)
    num_cached: int = 0


class DecodeEngine:
    """`StreamEngine` over a token engine.

    Args:
        engine: generates single sequences.
        model: name under which clients ask for the model.
        slots: requests run at once.
        max_images, max_audios: media per request, as reported.
    """

    needs_root = False

    def __init__(
        self, engine: TokenEngine, *, model: str, slots: int, max_images: int = 0, max_audios: int = 0
    ) -> None:
        self._engine = engine
        self._name = model
        self._max_images = max_images
        self._max_audios = max_audios
        self._model: EngineModel | None = None
        self.slots = slots

    async def start(self) -> tuple[ModelCard, ...]:
        loaded = await self._engine.start()
        self._model = loaded
        return (
            ModelCard(
                model=self._name,
                input_modalities=(Modality.TEXT, *loaded.takes),
                context_tokens=loaded.context_tokens,
                image_tokens=loaded.image_tokens,
                hidden_size=loaded.hidden_size,
                revision=loaded.revision,
                max_images=self._max_images if Modality.IMAGE in loaded.takes else 0,
                max_audios=self._max_audios if Modality.AUDIO in loaded.takes else 0,
            ),
        )

    async def run(self, item: StepItem, sink: TokenSink) -> Usage:
        loaded = self._loaded()
        job = _job(item, sink, loaded)
        routes = _routes(job)
        job.num_tokens = [going.num_done for going in routes]
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_until_cancelled(sink))
                choices = [
                    group.create_task(self._run_choice(job, choice, going))
                    for choice, going in enumerate(routes)
                    if not going.is_over
                ]
                for task in choices:
                    await task
                watch.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        return Usage(
            prompt_tokens=job.num_prompt_tokens,
            completion_tokens=sum(job.num_tokens),
            cached_tokens=min(job.num_cached, job.num_prompt_tokens),
        )

    def running(self) -> int:
        return self._engine.running()

    def is_alive(self) -> bool:
        """False once the engine or a process of it is dead: this worker has to be replaced."""
        return self._engine.is_alive()

    def is_responsive(self) -> bool:
        """False while the engine is dead or hangs: the worker is not ready."""
        return self._engine.is_responsive()

    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters in memory: the fleet prefers this worker for them."""
        return self._engine.adapters()

    def kv_cache_usage_ratio(self) -> float:
        return self._engine.kv_cache_usage_ratio()

    async def close(self) -> None:
        await self._engine.close()

    def _loaded(self) -> EngineModel:
        if self._model is None:
            raise EngineDeadError("the engine was not started")
        return self._model

    async def _run_choice(self, job: _Job, index: int, going: Route) -> None:
        loaded = self._loaded()
        vocabulary = loaded.vocabulary
        ends = end_token_ids(job.params, loaded.eos_token_ids)
        choice = Choice(vocabulary.detokenizer(), job.params, going, ends)
        ended = choice.rebuild()
        if ended is not None:
            await job.sink.tokens(
                index, (), ended.text, finish_reason=ended.finish_reason, stop_reason=ended.stop_reason
            )
            return
        request = _engine_request(job, index, going)
        async with aclosing(self._engine.generate(request)) as steps:
            async for step in steps:
                if job.sink.is_cancelled:
                    raise CancelledWorkError("nobody waits for this request")
                delta = choice.accept(step.token_ids, step.finish_reason, step.stop_token_id)
                job.num_tokens[index] = max(going.num_done, choice.num_tokens)
                job.num_cached = max(job.num_cached, step.num_cached_tokens)
                if delta.token_ids or delta.text or delta.finish_reason is not None:
                    first = delta.num_skipped
                    await job.sink.tokens(
                        index,
                        delta.token_ids,
                        delta.text,
                        logprobs=_logprobs(step.logprobs[first : first + len(delta.token_ids)], vocabulary),
                        finish_reason=delta.finish_reason,
                        stop_reason=delta.stop_reason,
                    )
                if delta.finish_reason is not None:
                    return
        raise EngineError("the engine ended a sequence without a reason")


async def _until_cancelled(sink: TokenSink) -> None:
    # The sink has no event to wait for: it may also learn of the cancel by a clock (deadline).
    while not sink.is_cancelled:  # noqa: ASYNC110
        await asyncio.sleep(_CANCEL_POLL_S)
    raise CancelledWorkError("nobody waits for this request")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that says most: a dead engine before a cancelled request before the rest."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    for kind in (EngineDeadError, CancelledWorkError):
        for error in flat:
            if isinstance(error, kind):
                return error
    return flat[0]


def _job(item: StepItem, sink: TokenSink, loaded: EngineModel) -> _Job:
    params = item.task.step.params
    if not isinstance(params, DecodeParams):
        raise InvalidInputError(f"decode was given {type(params).__name__}")
    prompt = _prompt(item.tensors)
    images = _images(item)
    for kind in {image.kind for image in images} - set(loaded.takes):
        raise InvalidInputError(f"this model takes no {kind}")
    attempt = item.attempt
    num_prompt_tokens = _num_prompt_tokens(item, prompt)
    return _Job(
        params=params,
        prompt=prompt,
        num_prompt_tokens=num_prompt_tokens,
        images=images,
        budget_tokens=token_budget(params, num_prompt_tokens, loaded.context_tokens),
        cache_salt=item.task.tenant,
        name=f"{attempt.request_id}.{attempt.step_id}.{attempt.epoch}.{attempt.delivery}",
        sink=sink,
    )


def _prompt(tensors: Mapping[tuple[str, str], Array]) -> tuple[int, ...]:
    for (_, name), array in tensors.items():
        if name == "prompt":
            return tuple(int(token_id) for token_id in array.tolist())
    raise InvalidInputError("the step has no prompt")


def _num_prompt_tokens(item: StepItem, prompt: tuple[int, ...]) -> int:
    """As the model sees it: the prompt holds one token per image, which the engine expands."""
    for output in item.task.inputs.values():
        if isinstance(output.result, PreprocessResult):
            return output.result.num_prompt_tokens
    return len(prompt)


def _media(item: StepItem) -> tuple[MediaItem, ...]:
    for output in item.task.inputs.values():
        if isinstance(output.result, PreprocessResult):
            return output.result.media
    return ()


def _images(item: StepItem) -> tuple[ImageEmbeds, ...]:
    """Embeddings in the order of the request's media, whichever step made them."""
    media = _media(item)
    found: list[tuple[int, ImageEmbeds]] = []
    for (step_id, name), array in item.tensors.items():
        if not name.startswith("embeds"):
            continue
        ref = item.task.inputs[step_id].tensors[name]
        index = int(name.removeprefix("embeds"))
        known = media[index] if index < len(media) else None
        grid, kind = (known.grid, known.kind) if known else (None, "image")
        found.append((index, ImageEmbeds(array, ref.dtype, ref.content_hash, grid, kind)))
    return tuple(image for _, image in sorted(found, key=lambda pair: pair[0]))


def _routes(job: _Job) -> list[Route]:
    progress = job.sink.resume_point()
    return [
        route(job.params, progress[choice] if choice < len(progress) else None, job.budget_tokens)
        for choice in range(max(1, job.params.n))
    ]


def _engine_request(job: _Job, index: int, going: Route) -> EngineRequest:
    return EngineRequest(
        request_id=f"{job.name}.{index}",
        prompt_token_ids=(*job.prompt, *going.replay),
        sampling=choice_sampling(job.params, index, max_tokens=going.max_tokens, min_tokens=going.min_tokens),
        cache_salt=job.cache_salt,
        images=job.images,
        num_resumed_tokens=len(going.replay),
        adapter=job.params.adapter,
    )


def _logprobs(rows: Sequence[tuple[Candidate, ...]], vocabulary: Vocabulary) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            chosen=_alternative(row[0], vocabulary),
            top=tuple(_alternative(candidate, vocabulary) for candidate in row[1:]),
        )
        for row in rows
    )


def _alternative(candidate: Candidate, vocabulary: Vocabulary) -> TokenAlternative:
    raw = vocabulary.token_bytes(candidate.token_id)
    return TokenAlternative(
        token=raw.decode("utf-8", "replace"), token_id=candidate.token_id, logprob=candidate.logprob, bytes_=raw
    )
