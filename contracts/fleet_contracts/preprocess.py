"""Stage `preprocess`: media and messages in, pixels and token ids out."""

from __future__ import annotations

from fleet_contracts.base import Contract


class PreprocessParams(Contract, frozen=True, kw_only=True, tag="preprocess.v1"):
    """What to do with the root source.

    Attributes:
        route: `chat` (root is a chat-completions body), `completion` (root is a completions body), `embedding` (root is
            an embeddings body; only in plans with `embed.v1`), `audio` (root is an audio or video file), `edit` (root
            is an `EditFiles`; only in plans with `diffusion_edit.v1`).
        max_new_tokens: tokens the client asked for, 0 = as many as fit; refused here when prompt + this exceeds the
            context of the model.
        max_pixels: pixel budget per image; 0 = the model's own.
        width, height: of the route `edit`: pixels that every picture is scaled to.
    """

    route: str = "chat"
    max_new_tokens: int = 0
    max_pixels: int = 0
    width: int = 0
    height: int = 0


class EditFiles(Contract, frozen=True, kw_only=True, tag="edit_files.v1"):
    """What a client sent to be edited: picture files as they came.

    Attributes:
        images: one or more, in the client's order.
        mask: of the first one; b"" = none.
    """

    images: tuple[bytes, ...]
    mask: bytes = b""


class MediaItem(Contract, frozen=True, kw_only=True):
    """One media part as the encoder will see it; reported in the request's timeline.

    Attributes:
        part: where it stood in the request, like `messages[0].content[1].image_url`.
        kind: `image`, `mask`, `audio`, `video`.
        width, height: pixels of the array given to the encoder, of one frame of a video; tiles lie below each other; 0
            for audio.
        mode: colour mode of that array (`RGB`, `1` for masks), `mono` for audio.
        sha256: hex digest of the decoded array's bytes, before normalisation (uint8 [height, width, 3]; audio: float32
            [samples]).
        num_tokens: embeddings this item has, so tokens in the prompt without those that some models put around it.
        source_width, source_height: pixels of what the client sent, after EXIF orientation.
        grid: steps in time (or tiles), rows and columns of the encoder's patches (audio: positions it fills, 1, 1);
            None from releases that knew none.
        max_pixels: budget that was applied, 0 = the model's own.
        cache_hit: True when the encoder's feature cache had it; set by the vision step.
        duration_s: seconds of audio or video as decoded.
        sample_rate_hz, num_channels: of what the client sent, as decoded.
    """

    part: str
    kind: str
    width: int
    height: int
    mode: str
    sha256: str
    num_tokens: int
    source_width: int = 0
    source_height: int = 0
    cache_hit: bool = False
    duration_s: float = 0.0
    sample_rate_hz: int = 0
    num_channels: int = 0
    grid: tuple[int, int, int] | None = None
    max_pixels: int = 0


class PreprocessResult(Contract, frozen=True, kw_only=True, tag="preprocess_result.v1"):
    """What `preprocess` says besides its tensors.

    Tensors of the step's output: `prompt` int32, one media token per image, video or recording; for each of `media`,
    by its place there, `pixels<i>` of an image (uint8 or float32 [3, height, width], or [tiles, 3, height, width]:
    whatever the adapter of the model wants) or a video (uint8 [frames, 3, height, width]) or `audio<i>` of a
    recording (float32 [mel bins, frames]). Of the route `embedding`: `prompt` and `lengths`, see `embed.py`; of
    `audio` only `audio0`: float32 [samples], mono, 16 kHz. Of `edit`: `image0`, `image1`, ... uint8 [height, width,
    3], all of the size asked for, and with a mask `mask`: uint8 [height, width], 1 = may change, 0 = stays.

    Attributes:
        num_prompt_tokens: tokens of the prompt as the model will see them, media tokens included.
        media: images, videos and recordings in the order of the request's parts.
    """

    num_prompt_tokens: int
    media: tuple[MediaItem, ...] = ()
