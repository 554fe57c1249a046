"""A model without files: bytes as tokens. For tests and load work, never the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet_preprocess.core.body import Message
from fleet_preprocess.core.chat import TemplateStyle, template_messages
from fleet_preprocess.core.fixed_resolution import FixedResolution
from fleet_preprocess.core.log_mel import MelSettings
from fleet_preprocess.core.qwen_audio import QwenAudio
from fleet_preprocess.core.resize import ResizeSpec
from fleet_preprocess.core.tools import with_calls_as_text, with_tools_as_text
from fleet_preprocess.engine.port import ModelFacts

IMAGE_ID = 256
START_ID = 257
END_ID = 258
#: Only of a model that takes recordings.
AUDIO_ID = 259
VOCAB_SIZE = 259

_MEDIA_IDS = {"image": IMAGE_ID, "audio": AUDIO_ID}
_STYLE = TemplateStyle(takes_strings=False, takes_parts=True)


class ScriptedPromptEngine:
    """Token ids 0-255 are UTF-8 bytes; 256 an image, 257 and 258 begin and end a turn, 259 a recording."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        """
        Args:
            engine_args: `image_tokens` (16; 0 = no pictures), `context_tokens` (8192), `image_side_px` (64),
                `takes_audio` (false), as Qwen2-Audio does.
        """
        self._image_tokens = int(engine_args.get("image_tokens", 16))
        self._context_tokens = int(engine_args.get("context_tokens", 8192))
        self._takes_audio = bool(engine_args.get("takes_audio", False))
        self._side_px = int(engine_args.get("image_side_px", 64))

    def load(self) -> ModelFacts:
        takes_images = self._image_tokens > 0
        return ModelFacts(
            revision="scripted-1",
            context_tokens=self._context_tokens,
            vocab_size=VOCAB_SIZE + self._takes_audio,
            image_token_id=IMAGE_ID if takes_images else -1,
            max_token_chars=4,
            images=self._family() if takes_images else None,
            audio_token_id=AUDIO_ID if self._takes_audio else -1,
            audios=QwenAudio(MelSettings()) if self._takes_audio else None,
        )

    def _family(self) -> FixedResolution:
        spec = ResizeSpec(height=self._side_px, width=self._side_px)
        return FixedResolution(resize=spec, num_tokens=self._image_tokens, grid_side=1)

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        ids: list[int] = []
        spoken = with_tools_as_text(with_calls_as_text(messages), tools)
        for message in template_messages(spoken, _STYLE, lambda text: text):
            ids += [START_ID, *f"{message['role']}\n".encode()]
            for part in message["content"]:
                ids += [_MEDIA_IDS[part["type"]]] if part["type"] in _MEDIA_IDS else part["text"].encode()
            ids.append(END_ID)
        return [*ids, START_ID, *b"assistant\n"]

    def embedding_ids(self, text: str) -> list[int]:
        return [START_ID, *text.encode(), END_ID]

    def completion_ids(self, text: str) -> list[int]:
        return list(text.encode())
