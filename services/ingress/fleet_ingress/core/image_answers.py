"""From pictures to OpenAI's answers: one JSON body, or the events of a stream."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

import msgspec

from fleet_contracts.diffusion import DiffusionParams
from fleet_contracts.events import Usage
from fleet_ingress.api.images import ImageDatum, ImageEvent, ImagesReport, ImageUsage
from fleet_ingress.core.picture_stream import ProgressMade

_encode = msgspec.json.Encoder().encode


class ShownPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture and its file. `index` counts those of its choice."""

    choice: int
    index: int
    is_final: bool
    file: bytes


class KeptPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Where a picture's file lies, and until when."""

    url: str
    expires_unix_s: int


class ImageRenderer:
    """Makes the answer of one request; pictures and progress are given in order, each once."""

    def __init__(self, params: DiffusionParams, created_unix_s: int, operation: str = "image_generation") -> None:
        """
        Args:
            operation: first part of the names of events.
        """
        self._params = params
        self._operation = operation
        self._created_unix_s = created_unix_s
        self._size = f"{params.width}x{params.height}"
        self._num_finals = 0
        self._last: ShownPicture | None = None

    def body(
        self, pictures: Iterable[ShownPicture], usage: Usage, kept: Mapping[int, KeptPicture] | None = None
    ) -> bytes:
        """The whole answer, choices in order.

        Args:
            kept: where the files lie, by choice; None: they are in the answer.
        """
        finals = sorted((one for one in pictures if one.is_final), key=lambda one: one.choice)
        return _encode(
            ImagesReport(
                created=self._created_unix_s,
                data=[self._datum(one, kept) for one in finals],
                size=self._size,
                output_format=self._params.format,
                usage=_usage(usage),
            )
        )

    def _datum(self, one: ShownPicture, kept: Mapping[int, KeptPicture] | None) -> ImageDatum:
        seed = self._params.seed + one.choice
        if kept is None:
            return ImageDatum(b64_json=_base64(one.file), seed=seed)
        place = kept[one.choice]
        return ImageDatum(url=place.url, expires_at=place.expires_unix_s, seed=seed)

    def events(self, news: Iterable[ShownPicture | ProgressMade]) -> bytes:
        """What can be sent now. The last final picture waits for `end`: with it the client learns the usage."""
        out = []
        for one in news:
            if isinstance(one, ProgressMade):
                event = ImageEvent(
                    type=f"{self._operation}.progress", created_at=self._created_unix_s, done_ratio=one.done_ratio
                )
                out.append(_sse(event))
                continue
            self._num_finals += one.is_final
            if self._num_finals == self._params.n and one.is_final:
                self._last = one
            else:
                out.append(self._picture(one))
        return b"".join(out)

    def end(self, usage: Usage) -> bytes:
        """The last event."""
        return b"" if self._last is None else self._picture(self._last, usage)

    def _picture(self, one: ShownPicture, usage: Usage | None = None) -> bytes:
        return _sse(
            ImageEvent(
                type=f"{self._operation}.{'completed' if one.is_final else 'partial_image'}",
                created_at=self._created_unix_s,
                index=one.choice,
                b64_json=_base64(one.file),
                partial_image_index=msgspec.UNSET if one.is_final else one.index,
                size=self._size,
                output_format=self._params.format,
                background="opaque",
                quality="auto",
                seed=self._params.seed + one.choice,
                usage=msgspec.UNSET if usage is None else _usage(usage),
            )
        )


def _usage(usage: Usage) -> ImageUsage:
    return ImageUsage(input_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens)


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")


def _sse(event: ImageEvent) -> bytes:
    return f"event: {event.type}\ndata: ".encode() + _encode(event) + b"\n\n"
