"""Messages of a chat and the media in them, checked beyond their types. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet_common.errors import InvalidInputError, UnsupportedModalityError
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard
from fleet_ingress.api.chat import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart

#: Media of one kind per request of models that name no limit: each is a step of the plan, which travels with the work.
MAX_MEDIA = 64

_URL_SCHEMES = ("data:", "http://", "https://")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A medium of a request.

    Attributes:
        param: where it stands, like `messages[0].content[1].input_audio`.
        kind: image, video or audio.
    """

    param: str
    kind: Modality


@dataclass(frozen=True, slots=True)
class _Words:
    """How refusals speak of a kind of media, and their code for too many."""

    kind: str
    plural: str
    too_many: str


_WORDS: Mapping[Modality, _Words] = {
    Modality.IMAGE: _Words("pictures", "pictures", "too_many_images"),
    Modality.VIDEO: _Words("videos", "videos", "too_many_videos"),
    Modality.AUDIO: _Words("audio", "recordings", "too_many_audios"),
}


def check_messages(messages: Sequence[ChatMessage]) -> tuple[MediaPart, ...]:
    """The media of a chat in the order of their parts. Raises InvalidInputError."""
    if not messages:
        raise InvalidInputError("`messages` must hold at least one message.", param="messages")
    media: list[MediaPart] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if message.role == "tool" and not message.tool_call_id:
            raise InvalidInputError("A tool message needs `tool_call_id`.", param=f"{place}.tool_call_id")
        if message.tool_calls and message.role != "assistant":
            raise InvalidInputError("Only an assistant message has `tool_calls`.", param=f"{place}.tool_calls")
        if message.content is None and not message.tool_calls and message.refusal is None:
            raise InvalidInputError(f"`{place}.content` is required.", param=f"{place}.content")
        if isinstance(message.content, list):
            media.extend(_check_parts(message.content, message.role, f"{place}.content"))
    return tuple(media)


def check_media(media: Sequence[MediaPart], card: ModelCard) -> None:
    """Whether the model takes such media, and so many. Raises UnsupportedModalityError, InvalidInputError."""
    limits = {Modality.IMAGE: card.max_images, Modality.VIDEO: card.max_images, Modality.AUDIO: card.max_audios}
    for kind, words in _WORDS.items():
        parts = [part for part in media if part.kind is kind]
        if parts and kind not in card.input_modalities:
            raise UnsupportedModalityError(f"This model takes no {words.kind}.", param=parts[0].param)
        limit = min(limits[kind] or MAX_MEDIA, MAX_MEDIA)
        if len(parts) > limit:
            raise InvalidInputError(
                f"The model takes {limit} {words.plural} per request, this one has {len(parts)}.",
                param=parts[limit].param,
                code=words.too_many,
            )


def _check_parts(parts: Sequence[Part], role: str, place: str) -> Iterator[MediaPart]:
    if not parts:
        raise InvalidInputError("`content` must not be an empty list.", param=place)
    for index, part in enumerate(parts):
        where = f"{place}[{index}]"
        if isinstance(part, TextPart):
            continue
        if not isinstance(part, ImagePart | VideoPart | AudioPart):
            raise InvalidInputError("Parts of this type are not supported yet.", param=where, code="unsupported_part")
        if role != "user":
            raise InvalidInputError("Only a user message may hold pictures, videos or audio.", param=where)
        yield _medium(part, where)


def _medium(part: ImagePart | VideoPart | AudioPart, where: str) -> MediaPart:
    match part:
        case ImagePart():
            return _at_url(part.image_url.url, f"{where}.image_url", Modality.IMAGE, "A picture")
        case VideoPart():
            return _at_url(part.video_url.url, f"{where}.video_url", Modality.VIDEO, "A video")
        case AudioPart():
            return _audio(part, where)


def _at_url(url: str, param: str, kind: Modality, what: str) -> MediaPart:
    if not url.lower().startswith(_URL_SCHEMES):
        raise InvalidInputError(
            f"{what} is given as a data:, http: or https: URL.", param=param, code="url_not_allowed"
        )
    return MediaPart(param, kind)


def _audio(part: AudioPart, where: str) -> MediaPart:
    if not part.input_audio.data:
        raise InvalidInputError("The audio is empty.", param=f"{where}.input_audio.data", code="invalid_audio")
    return MediaPart(f"{where}.input_audio", Modality.AUDIO)
