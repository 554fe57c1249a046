"""The stage's engine: a client's body in; token ids, pixels and their facts out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from fleet_common.errors import (
    ContractError,
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
    FleetError,
    InvalidInputError,
    UnsupportedModalityError,
)
from fleet_common.stage.port import Product, StepItem
from fleet_common.tensors.port import Array
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_contracts.preprocess import PreprocessParams, PreprocessResult
from fleet_preprocess.audio_parts import PreparedAudio, prepare_audio
from fleet_preprocess.core.body import (
    AudioSource,
    ChatBody,
    ImageSource,
    MediaSource,
    VideoSource,
    media_sources,
    num_text_chars,
    read_chat,
    read_completion,
    read_inputs,
)
from fleet_preprocess.core.budget import PixelBudgets, smallest_budget
from fleet_preprocess.core.data_url import decode_data_url, is_data_url
from fleet_preprocess.core.limits import MediaLimits, check_context, check_count, check_inputs, check_text
from fleet_preprocess.core.media_url import FileKind, check_media_url
from fleet_preprocess.engine.port import ModelFacts, PromptEngine
from fleet_preprocess.fetch import MediaFetcher
from fleet_preprocess.image_parts import PreparedImage, prepare_image, prepare_video

T = TypeVar("T")


class PreprocessEngine:
    """Prepares requests side by side; the failure of one is its own. Implements `BatchEngine`."""

    needs_root = True

    def __init__(
        self,
        model: str,
        prompts: PromptEngine,
        limits: MediaLimits,
        *,
        budgets: PixelBudgets = PixelBudgets(),  # noqa: B008 (frozen)
        fetcher: MediaFetcher | None = None,
        context_tokens: int = 0,
        num_threads: int = 2,
        max_batch: int = 1,
    ) -> None:
        """
        Args:
            model: name under which clients ask for the model.
            budgets: pixels of an image at most, on top of the model's own rule.
            fetcher: for media behind URLs; None: only `data:` URLs. Closed by `close`.
            context_tokens: limit to enforce; 0: the model's own.
        """
        self.max_batch = max_batch
        self._model = model
        self._prompts = prompts
        self._limits = limits
        self._budgets = budgets
        self._fetcher = fetcher
        self._context_tokens = context_tokens
        self._facts: ModelFacts | None = None
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="preprocess")

    async def start(self) -> tuple[ModelCard, ...]:
        try:
            facts = await self._in_thread(self._prompts.load)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EngineDeadError(f"the model could not be loaded: {error}") from error
        self._facts = facts
        self._context_tokens = self._context_tokens or facts.context_tokens
        if not self._context_tokens:
            raise EngineDeadError("the model's config names no context length: set context_tokens")
        seen = (Modality.IMAGE, Modality.VIDEO) if facts.images is not None else ()
        heard = (Modality.AUDIO,) if facts.audios is not None else ()
        return (
            ModelCard(
                model=self._model,
                input_modalities=(Modality.TEXT, *seen, *heard),
                context_tokens=self._context_tokens,
                image_tokens=facts.image_tokens,
                revision=facts.revision,
                max_images=self._limits.max_images if seen else 0,
                max_audios=self._limits.max_audios if heard else 0,
            ),
        )

    async def run(self, items: Sequence[StepItem]) -> Sequence[Product | FleetError]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._prepare_or_refuse(item)) for item in items]
        return [task.result() for task in tasks]

    async def close(self) -> None:
        if self._fetcher is not None:
            await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prepare_or_refuse(self, item: StepItem) -> Product | FleetError:
        try:
            return await self._prepare(item)
        except FleetError as error:
            return error
        except MemoryError:
            return EngineOutOfMemoryError("no memory for this request's media")

    async def _prepare(self, item: StepItem) -> Product:
        params = item.task.step.params
        if not isinstance(params, PreprocessParams):
            raise ContractError(f"preprocess cannot run {type(params).__name__}")
        if params.route == "embedding":
            return await self._in_thread(lambda: self._inputs(item.root))
        if params.route == "completion":
            ids = await self._in_thread(lambda: self._completion_ids(item.root))
            return self._product(ids, (), params)
        chat = await self._in_thread(lambda: self._read_chat(item.root))
        sources = self._checked_sources(chat)
        ids = await self._in_thread(lambda: self._prompts.chat_ids(chat.messages, chat.usable_tools))
        # Before any image is decoded: so many tokens they take at least.
        self._check_context(ids, params, self._min_media_tokens(sources))
        media = [await self._prepare_medium(source, params) for source in sources]
        return self._product(ids, media, params)

    def _read_chat(self, body: bytes) -> ChatBody:
        chat = read_chat(body)
        check_text(num_text_chars(chat), self._model_facts.max_token_chars, self._context_tokens, param="messages")
        return chat

    def _checked_sources(self, chat: ChatBody) -> Sequence[MediaSource]:
        sources = media_sources(chat)
        images = [source for source in sources if isinstance(source, ImageSource | VideoSource)]
        audios = [source for source in sources if isinstance(source, AudioSource)]
        if images and self._model_facts.images is None:
            raise UnsupportedModalityError("this model does not take images or videos", param=images[0].param)
        if audios and self._model_facts.audios is None:
            raise UnsupportedModalityError("this model does not take audio", param=audios[0].param)
        check_count(len(images), self._limits.max_images, "images and videos")
        check_count(len(audios), self._limits.max_audios, "recordings")
        return sources

    def _completion_ids(self, body: bytes) -> list[int]:
        prompt = read_completion(body)
        if isinstance(prompt, str):
            check_text(len(prompt), self._model_facts.max_token_chars, self._context_tokens, param="prompt")
            ids = self._prompts.completion_ids(prompt)
        else:
            ids = self._checked_ids(prompt, "prompt")
        if not ids:
            raise InvalidInputError("the prompt is empty", param="prompt")
        return ids

    def _checked_ids(self, ids: list[int], param: str) -> list[int]:
        """Token ids a client made itself."""
        facts = self._model_facts
        places = (facts.image_token_id, facts.audio_token_id)
        if any(not 0 <= token_id < facts.vocab_size or token_id in places for token_id in ids):
            raise InvalidInputError(f"`{param}` holds ids this model has no text token for", param=param)
        return ids

    def _inputs(self, body: bytes) -> Product:
        """Token ids of every input of an embeddings body, one after the other."""
        inputs = read_inputs(body)
        ids: list[list[int]] = []
        for index, given in enumerate(inputs):
            param = f"input[{index}]" if len(inputs) > 1 else "input"
            if isinstance(given, str):
                check_text(len(given), self._model_facts.max_token_chars, self._context_tokens, param=param)
                ids.append(self._prompts.embedding_ids(given))
            else:
                ids.append(self._checked_ids(given, param))
        lengths = [len(one) for one in ids]
        check_inputs(lengths, self._context_tokens)
        return Product(
            tensors={
                "prompt": np.asarray([token_id for one in ids for token_id in one], dtype=np.int32),
                "lengths": np.asarray(lengths, dtype=np.int32),
            },
            result=PreprocessResult(num_prompt_tokens=sum(lengths)),
        )

    def _min_media_tokens(self, sources: Sequence[MediaSource]) -> int:
        images, audios = self._model_facts.images, self._model_facts.audios
        per_image = images.min_tokens + images.tokens_around if images else 0
        per_audio = audios.min_tokens if audios else 0
        return sum(per_audio if isinstance(source, AudioSource) else per_image for source in sources)

    def _check_context(self, ids: Sequence[int], params: PreprocessParams, num_media_tokens: int) -> int:
        """Raises ContextLengthError; returns the tokens of the prompt as the model will see it."""
        num_prompt_tokens = len(ids) - self._num_places(ids) + num_media_tokens
        param = "prompt" if params.route == "completion" else "messages"
        check_context(num_prompt_tokens, num_media_tokens, params.max_new_tokens, self._context_tokens, param=param)
        return num_prompt_tokens

    def _num_places(self, ids: Sequence[int]) -> int:
        places = (self._model_facts.image_token_id, self._model_facts.audio_token_id)
        return sum(token_id in places for token_id in ids)

    async def _prepare_medium(self, source: MediaSource, params: PreprocessParams) -> PreparedImage | PreparedAudio:
        facts, limits, seen, heard = self._model_facts, self._limits, self._model_facts.images, self._model_facts.audios
        match source:
            case AudioSource() if heard is not None:
                return await self._in_thread(lambda: prepare_audio(source, heard, limits.audio, facts.revision))
            case ImageSource() if seen is not None:
                data = await self._file(source.url, FileKind("image", limits.max_bytes), source.param)
                # Where every image has the same tokens, low detail would save none and only blur.
                low = self._budgets.low_detail_pixels if source.is_low_detail and not seen.num_tokens else 0
                budget = smallest_budget((self._budgets.max_pixels, params.max_pixels, source.max_pixels, low))
                return await self._in_thread(lambda: prepare_image(data, source, seen, limits, budget, facts.revision))
            case VideoSource() if seen is not None:
                data = await self._file(source.url, FileKind("video", limits.video.max_bytes), source.param)
                budget = smallest_budget((self._budgets.max_pixels, params.max_pixels, source.max_pixels))
                return await self._in_thread(lambda: prepare_video(data, source, seen, limits, budget, facts.revision))
            case _:
                raise EngineError(f"{type(source).__name__} came to a model that takes none")

    async def _file(self, url: str, kind: FileKind, param: str) -> bytes:
        if is_data_url(url):
            return await self._in_thread(lambda: decode_data_url(url, kind, param=param))
        if self._fetcher is not None:
            return await self._fetcher.fetch(url, kind, param=param)
        check_media_url(url, (), param=param)
        raise EngineError("a URL passed an empty list of hosts")

    def _product(
        self, ids: Sequence[int], prepared: Sequence[PreparedImage | PreparedAudio], params: PreprocessParams
    ) -> Product:
        around = self._model_facts.images.tokens_around if self._model_facts.images else 0
        num_media_tokens = sum(one.item.num_tokens for one in prepared)
        num_media_tokens += around * sum(isinstance(one, PreparedImage) for one in prepared)
        num_prompt_tokens = self._check_context(ids, params, num_media_tokens)
        tensors: dict[str, Array] = {"prompt": np.asarray(ids, dtype=np.int32)}
        hashes: dict[str, str] = {}
        for i, one in enumerate(prepared):
            name = f"pixels{i}" if isinstance(one, PreparedImage) else f"audio{i}"
            tensors[name], hashes[name] = one.array, one.content_hash
        media = tuple(one.item for one in prepared)
        return Product(
            tensors=tensors,
            result=PreprocessResult(num_prompt_tokens=num_prompt_tokens, media=media),
            media=media,
            hashes=hashes,
        )

    @property
    def _model_facts(self) -> ModelFacts:
        if self._facts is None:
            raise EngineError("the engine is not started")
        return self._facts

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
