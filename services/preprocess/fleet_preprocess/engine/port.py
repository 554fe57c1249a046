"""What preprocess needs to know of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fleet_preprocess.core.audio_families import AudioFamily
from fleet_preprocess.core.body import Message
from fleet_preprocess.core.families import ImageFamily


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a loaded model.

    Attributes:
        revision: identifies weights and image settings; part of content hashes.
        context_tokens: prompt + output limit.
        vocab_size: token ids are below this.
        image_token_id: the id that marks an image's place; -1 when it takes none.
        max_token_chars: characters of the longest token; 0: unknown.
        audio_token_id: the same of a recording's place.
        audios: how recordings become features and tokens; None when it takes none.
        images: how images become the encoder's arrays and tokens; None when it takes none.
    """

    revision: str
    context_tokens: int
    vocab_size: int
    image_token_id: int = -1
    max_token_chars: int = 0
    images: ImageFamily | None = None
    audio_token_id: int = -1
    audios: AudioFamily | None = None

    @property
    def image_tokens(self) -> int:
        """Tokens of every image; 0 when they depend on its size, or there are none."""
        return self.images.num_tokens if self.images else 0


class PromptEngine(Protocol):
    """Chat template and tokenizer of one model. Methods block and may be called from several threads at once."""

    def load(self) -> ModelFacts:
        """Read the model's files. Raises OSError or ValueError when they are missing or not understood."""

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """Token ids of a chat, generation prompt included, one `image_token_id` per image part and one
        `audio_token_id` per audio part, in their order.

        Text of messages never gives special tokens.
        Raises:
            InvalidInputError: the template refuses these messages.
        """

    def embedding_ids(self, text: str) -> list[int]:
        """Token ids of an input of an embedding model, with what the tokenizer puts around every text."""

    def completion_ids(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what the tokenizer puts before every text. Never special ones from text."""
