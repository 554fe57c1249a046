"""Answers put together of what several steps made: text, speech, pictures. Whole, or as `data:` events. Pure."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

import msgspec

from fleet_contracts.events import Usage
from fleet_ingress.api import responses as api
from fleet_ingress.core.render import usage_report

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ComposedHead:
    """What every chunk carries. `has_text`: the answer has a text besides what is spoken."""

    answer_id: str
    model: str
    created_unix_s: int
    has_text: bool
    include_usage: bool = False


@dataclass(slots=True)
class ComposedAnswer:
    """Takes the parts as they come; each method returns the event that shows its part."""

    head: ComposedHead
    finish_reason: str = "stop"
    _text: list[str] = field(default_factory=list)
    _transcript: list[str] = field(default_factory=list)
    _audio: bytearray = field(default_factory=bytearray)
    _pictures: list[api.MadePicture] = field(default_factory=list)
    _has_begun: bool = False
    _speaks: bool = False

    def text(self, piece: str) -> bytes:
        """A piece of the text."""
        self._text.append(piece)
        return self._event(api.ChatDelta(content=piece))

    def transcript(self, piece: str) -> bytes:
        """A piece of what is, or will be, spoken."""
        self._transcript.append(piece)
        self._speaks = True
        return self._event(api.ChatDelta(audio=api.SpokenDelta(id=self._audio_id, transcript=piece)))

    def audio(self, data: bytes) -> bytes:
        """A piece of the sound file."""
        self._audio += data
        self._speaks = True
        shown = base64.b64encode(data).decode("ascii")
        return self._event(api.ChatDelta(audio=api.SpokenDelta(id=self._audio_id, data=shown)))

    def picture(self, url: str) -> bytes:
        """A picture."""
        made = api.MadePicture(image_url=api.PictureUrl(url=url))
        self._pictures.append(made)
        return self._event(api.ChatDelta(images=[made]))

    def last_events(self, usage: Usage) -> bytes:
        """What a stream ends with, but for `[DONE]`."""
        events = b""
        if self._speaks:
            last = api.SpokenDelta(id=self._audio_id, expires_at=self.head.created_unix_s)
            events = self._event(api.ChatDelta(audio=last))
        events += self._event(api.ChatDelta(), finish_reason=self.finish_reason)
        if self.head.include_usage:
            events += _sse(self._chunk([], usage_report(usage)))
        return events

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        head = self.head
        speech: api.SpokenAnswer | msgspec.UnsetType = msgspec.UNSET
        if self._speaks:
            speech = api.SpokenAnswer(
                id=self._audio_id,
                data=base64.b64encode(self._audio).decode("ascii"),
                expires_at=head.created_unix_s,
                transcript="".join(self._transcript),
            )
        message = api.ChatAnswer(
            content="".join(self._text) if head.has_text else None,
            audio=speech,
            images=self._pictures or msgspec.UNSET,
        )
        choice = api.ChatChoice(index=0, message=message, finish_reason=self.finish_reason)
        return _encode(
            api.ChatCompletion(
                id=head.answer_id,
                created=head.created_unix_s,
                model=head.model,
                choices=[choice],
                usage=usage_report(usage),
            )
        )

    @property
    def _audio_id(self) -> str:
        return f"audio_{self.head.answer_id.partition('-')[2]}"

    def _event(self, delta: api.ChatDelta, finish_reason: str | None = None) -> bytes:
        first = b""
        if not self._has_begun:
            self._has_begun = True
            content = "" if self.head.has_text else None
            first = self._event(api.ChatDelta(role="assistant", content=content))
        choice = api.ChatChunkChoice(index=0, delta=delta, finish_reason=finish_reason)
        usage = None if self.head.include_usage else msgspec.UNSET
        return first + _sse(self._chunk([choice], usage))

    def _chunk(
        self, choices: list[api.ChatChunkChoice], usage: api.UsageReport | msgspec.UnsetType | None
    ) -> api.ChatChunk:
        head = self.head
        return api.ChatChunk(
            id=head.answer_id, created=head.created_unix_s, model=head.model, choices=choices, usage=usage
        )


def _sse(message: msgspec.Struct) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"
