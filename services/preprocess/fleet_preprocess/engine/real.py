"""Chat template and tokenizer of a model folder (Hugging Face layout), without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from fleet_common.checkpoints import (
    checkpoint_revision,
    locate_checkpoint,
    makes_embeddings,
    max_input_tokens,
    read_json,
)
from fleet_common.errors import EngineError, InvalidInputError
from fleet_preprocess.core.body import Message, Part
from fleet_preprocess.core.chat import TEMPLATE_TYPES, TemplateStyle, quote_deep, template_messages
from fleet_preprocess.core.tools import with_calls_as_text, with_tools_as_text
from fleet_preprocess.engine.files import (
    read_audio_facts,
    read_chat_template,
    read_context_tokens,
    read_image_facts,
    read_named_tokens,
)
from fleet_preprocess.engine.port import ModelFacts
from fleet_preprocess.engine.tokens import GuardedTokenizer

_PATTERNS = ("*.json", "*.jinja")
_PROBE = "fleetprobe"
_TOOLS = re.compile(r"\btools\b")


class CheckpointPromptEngine:
    """The model's own template (transformers' sandboxed Jinja) and tokenizer.json."""

    def __init__(self, name_or_path: str, template_variables: Mapping[str, Any], nonce: str) -> None:
        """
        Args:
            name_or_path: model folder or Hugging Face id.
            template_variables: extra variables of the chat template, like `enable_thinking`.
            nonce: lower-case hex that nobody can guess; keeps text of users apart from special tokens.
        """
        self._name_or_path = name_or_path
        self._variables = dict(template_variables)
        self._nonce = nonce
        self._template = ""
        self._image_token_id = -1
        self._audio_token_id = -1
        self._style = TemplateStyle()
        self._tokenizer: GuardedTokenizer | None = None

    def load(self) -> ModelFacts:
        folder = locate_checkpoint(self._name_or_path, _PATTERNS)
        config = read_json(folder, "config.json")
        if not config or not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"config.json and tokenizer.json are needed in the model folder {folder.name}")
        images = read_image_facts(folder, config)
        named = read_named_tokens(folder)
        audios = read_audio_facts(folder, config)
        vocabulary = read_json(folder, "tokenizer.json")
        image_literal = _literal_of(vocabulary, images.token_id) if images else ""
        audio_literal = _literal_of(vocabulary, audios.token_id) if audios else ""
        specials = [*named.values(), image_literal, audio_literal]
        tokenizer = GuardedTokenizer(folder / "tokenizer.json", specials, self._nonce)
        self._tokenizer = tokenizer
        self._template = read_chat_template(folder)
        self._variables = {**named, **self._variables}
        self._image_token_id = images.token_id if images else -1
        self._audio_token_id = audios.token_id if audios else -1
        self._style = self._find_style(image_literal, audio_literal)
        return ModelFacts(
            revision=checkpoint_revision(folder),
            context_tokens=max_input_tokens(folder) if makes_embeddings(folder) else read_context_tokens(config),
            vocab_size=tokenizer.vocab_size,
            image_token_id=self._image_token_id,
            max_token_chars=tokenizer.max_token_chars,
            images=images.family if images else None,
            audio_token_id=self._audio_token_id,
            audios=audios.family if audios else None,
        )

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        tokenizer = self._loaded()
        if not self._template:
            raise InvalidInputError("this model has no chat template; use completions", param="messages")
        quote = tokenizer.specials.quote
        try:
            if not self._style.knows_calls:
                messages = with_calls_as_text(messages)
            if not self._style.knows_tools:
                messages, tools = with_tools_as_text(messages, tools), None
            shaped = template_messages(messages, self._style, quote)
            rendered = self._render(shaped, quote_deep(list(tools), quote) if tools else None)
        except jinja2.TemplateError as error:
            raise InvalidInputError(f"the model's chat template: {error}", param="messages") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError("the model's chat template cannot take these messages", param="messages") from error
        ids = tokenizer.encode(rendered)
        self._check_places(ids, messages)
        return ids

    def completion_ids(self, text: str) -> list[int]:
        tokenizer = self._loaded()
        return [*tokenizer.prefix_ids, *tokenizer.encode(tokenizer.specials.quote(text))]

    def embedding_ids(self, text: str) -> list[int]:
        return [*self.completion_ids(text), *self._loaded().suffix_ids]

    def _loaded(self) -> GuardedTokenizer:
        if self._tokenizer is None:
            raise EngineError("the model is not loaded")
        return self._tokenizer

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        rendered, _ = render_jinja_template(
            [messages], tools=tools, chat_template=self._template, add_generation_prompt=True, **self._variables
        )
        return str(rendered[0])

    def _check_places(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        kinds = [TEMPLATE_TYPES.get(part.type) for message in messages for part in _parts(message)]
        for kind, token_id in (("image", self._image_token_id), ("audio", self._audio_token_id)):
            if kind in kinds and ids.count(token_id) != kinds.count(kind):
                raise EngineError(f"the chat template does not place one token per {kind}")

    def _find_style(self, image_literal: str, audio_literal: str) -> TemplateStyle:
        """Try what the template does with strings and with parts: templates do not say."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": _PROBE}]
        if image_literal:
            parts.insert(0, {"type": "image"})
        if audio_literal:
            parts.insert(0, {"type": "audio"})
        with_parts = self._try(parts)
        literals = [literal for literal in (image_literal, audio_literal) if literal]
        return TemplateStyle(
            takes_strings=_PROBE in self._try(_PROBE),
            takes_parts=_PROBE in with_parts
            and "'type'" not in with_parts
            and all(with_parts.count(literal) == 1 for literal in literals),
            knows_calls="tool_calls" in self._template,
            knows_tools=_TOOLS.search(self._template) is not None,
            knows_developer="developer" in self._template,
            image_token=image_literal,
            audio_token=audio_literal,
        )

    def _try(self, content: Any) -> str:
        try:
            return self._render([{"role": "user", "content": content}], None)
        except (jinja2.TemplateError, TypeError, ValueError):
            return ""  # so it does not take content of this kind


def _literal_of(tokenizer_json: Mapping[str, Any], token_id: int) -> str:
    for token in tokenizer_json.get("added_tokens", []):
        if token["id"] == token_id:
            return str(token["content"])
    raise ValueError(f"tokenizer.json has no added token with the image token's id {token_id}")


def _parts(message: Message) -> Sequence[Part]:
    return message.content if isinstance(message.content, list) else ()
