"""What preprocess refuses, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_common.errors import ContextLengthError
from fleet_preprocess.core.audio import AudioLimits

#: Tokens of all inputs of one embeddings request, as OpenAI has it.
MAX_EMBEDDING_TOKENS = 300_000


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Caps on one video file.

    Attributes:
        max_bytes: of the file.
        max_s: seconds, counted while decoding.
        max_frames: that a model gets to see, at least 1.
        max_pixels: of one frame.
        max_decoded_pixels: of all frames together, those between the kept ones too: what decoding costs.
        max_aspect_ratio: longer side over shorter side; exactly this is fine.
    """

    max_bytes: int = 20 << 20
    max_s: float = 120.0
    max_frames: int = 16
    max_pixels: int = 8_847_360
    max_decoded_pixels: int = 120 * 30 * 1280 * 720
    max_aspect_ratio: float = 200.0


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Caps on one media part, checked from headers before anything is decoded.

    Attributes:
        max_bytes: encoded file.
        max_pixels: width x height as the header says.
        max_aspect_ratio: longer side over shorter side; exactly this is fine.
        max_images: pictures and videos per request.
        max_audios: recordings per request.
        audio: caps on a recording, on top of the model's own.
        video: caps on a video.
    """

    max_bytes: int = 20 << 20
    max_pixels: int = 40_000_000
    max_aspect_ratio: float = 200.0
    max_images: int = 8
    max_audios: int = 8
    audio: AudioLimits = field(default_factory=AudioLimits)
    video: VideoLimits = field(default_factory=VideoLimits)


def check_count(num_media: int, limit: int, kinds: str) -> None:
    """Raises ContextLengthError when a request brings more media of a kind than a prompt may hold."""
    if num_media > limit:
        raise ContextLengthError(
            f"this model takes at most {limit} {kinds} per request, but {num_media} were sent", param="messages"
        )


def check_text(num_chars: int, max_token_chars: int, context_tokens: int, *, param: str) -> None:
    """Refuse text that cannot fit before it is tokenized, which takes a second per megabyte.

    Args:
        max_token_chars: of the longest token of the vocabulary; 0: unknown, nothing is refused.
    Raises:
        ContextLengthError: even in the longest tokens the text is longer than the context.
    """
    if max_token_chars and num_chars > context_tokens * max_token_chars:
        raise ContextLengthError(
            f"this model's context is {context_tokens} tokens, but the request has a prompt of {num_chars} characters, "
            f"which are more than {num_chars // max_token_chars} tokens",
            param=param,
        )


def check_context(
    num_prompt_tokens: int, num_media_tokens: int, max_new_tokens: int, context_tokens: int, *, param: str
) -> None:
    """Refuse what does not fit the model's context; nothing is clipped silently.

    Args:
        num_prompt_tokens: the whole prompt, `num_media_tokens` included.
        max_new_tokens: 0 when the client named no number; then one token must fit.
    Raises:
        ContextLengthError: naming the limit and the counts.
    """
    if num_prompt_tokens + max(max_new_tokens, 1) <= context_tokens:
        return
    wanted = f" and {max_new_tokens} tokens of output" if max_new_tokens else ", which leaves no room for output"
    raise ContextLengthError(
        f"this model's context is {context_tokens} tokens, but the request has a prompt of {num_prompt_tokens} tokens "
        f"({num_media_tokens} of them from media){wanted}",
        param=param,
    )


def check_inputs(lengths: Sequence[int], context_tokens: int) -> None:
    """Refuse inputs that do not fit an embedding model; nothing is cut silently.

    Args:
        lengths: tokens of each input, special ones included.
    Raises:
        ContextLengthError: naming the input, the limit and the count.
    """
    for index, num_tokens in enumerate(lengths):
        if num_tokens > context_tokens:
            raise ContextLengthError(
                f"this model takes inputs of at most {context_tokens} tokens, but input {index} has {num_tokens}",
                param=f"input[{index}]" if len(lengths) > 1 else "input",
            )
    if sum(lengths) > MAX_EMBEDDING_TOKENS:
        raise ContextLengthError(
            f"a request may have {MAX_EMBEDDING_TOKENS} tokens in all its inputs together, this one has {sum(lengths)}",
            param="input",
        )
