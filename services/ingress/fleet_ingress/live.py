"""One accepted request: its state machine, and what waits for the HTTP side."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import msgspec

from fleet_common.tensors.port import Array
from fleet_contracts.base import RequestId
from fleet_contracts.tensors import TensorRef
from fleet_contracts.work import StepTask
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.api.timeline import RequestReport, RequestUsage
from fleet_ingress.core.image_answers import ShownPicture
from fleet_ingress.core.media_stream import MediaDelta
from fleet_ingress.core.parsed import ParsedRequest
from fleet_ingress.core.picture_stream import ProgressMade
from fleet_ingress.core.request_state import End, RequestState
from fleet_ingress.core.token_stream import Delta
from fleet_ingress.picture_files import PictureFiles


@dataclass(slots=True)
class LiveRequest:
    """An accepted request, until its report is forgotten.

    Attributes:
        body: what the client sent; kept until the outcome, then b"".
        task: the first step's work item as published first.
        roots: refs of the body in the store, one per publish.
        files: of its pictures, while nobody has taken them.
        outputs: tensors that are the answer, by name.
        created_unix_s, first_token_unix_s, ended_unix_s: wall-clock seconds.
    """

    request_id: RequestId
    tenant: str
    parsed: ParsedRequest
    body: bytes
    state: RequestState
    created_unix_s: float
    task: StepTask
    roots: list[TensorRef] = field(default_factory=list)
    files: PictureFiles = field(default_factory=PictureFiles)
    outputs: dict[str, Array] = field(default_factory=dict)
    first_token_unix_s: float | None = None
    ended_unix_s: float | None = None
    _deltas: deque[Delta] = field(default_factory=deque)
    _pictures: deque[ShownPicture | ProgressMade] = field(default_factory=deque)
    _media: deque[MediaDelta] = field(default_factory=deque)
    _end: End | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def nonce(self) -> str:
        """Last token of the request's event subject."""
        return self.task.events.nonce

    def put(self, delta: Delta) -> None:
        """Hand a delta to the HTTP side."""
        self._deltas.append(delta)
        self._wake.set()

    def put_picture(self, news: ShownPicture | ProgressMade) -> None:
        """Hand a picture, or progress towards it, to the HTTP side."""
        self._pictures.append(news)
        self._wake.set()

    def put_medium(self, delta: MediaDelta) -> None:
        """Hand a medium to the HTTP side."""
        self._media.append(delta)
        self._wake.set()

    def finish(self, end: End) -> None:
        """Hand the outcome to the HTTP side; what only a running request needs is let go."""
        self._end = end
        self.body = b""
        self.state.choices = ()
        self._wake.set()
        self._ended.set()

    async def take(self) -> tuple[list[Delta], End | None]:
        """Wait for news: deltas since the last call, in order, and the outcome once there is one."""
        await self._wake.wait()
        self._wake.clear()
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas, self._end

    async def take_pictures(self) -> tuple[list[ShownPicture | ProgressMade], End | None]:
        """Wait for news: pictures and progress since the last call, in order, and the outcome once there is one."""
        await self._wake.wait()
        self._wake.clear()
        return self._taken_pictures(), self._end

    async def pictures_outcome(self) -> tuple[list[ShownPicture | ProgressMade], End]:
        """Wait for the end: all pictures, and the outcome."""
        await self._ended.wait()
        assert self._end is not None
        return self._taken_pictures(), self._end

    def _taken_pictures(self) -> list[ShownPicture | ProgressMade]:
        news = list(self._pictures)
        self._pictures.clear()
        return news

    async def take_media(self) -> tuple[list[MediaDelta], End | None]:
        """Wait for news: media since the last call, in order, and the outcome once there is one."""
        await self._wake.wait()
        self._wake.clear()
        media = list(self._media)
        self._media.clear()
        return media, self._end

    async def media_outcome(self) -> tuple[list[MediaDelta], End]:
        """Wait for the end: all media, in order, and the outcome."""
        await self._ended.wait()
        media = list(self._media)
        self._media.clear()
        assert self._end is not None
        return media, self._end

    async def outcome(self) -> tuple[list[Delta], End]:
        """Wait for the end: all deltas, in order, and the outcome."""
        await self._ended.wait()
        deltas = list(self._deltas)
        self._deltas.clear()
        assert self._end is not None
        return deltas, self._end

    def forget_deltas(self) -> None:
        """The HTTP side is gone."""
        self._deltas.clear()
        self._pictures.clear()
        self.files.clear()
        self._media.clear()
        self.outputs = {}

    def report(self) -> bytes:
        """JSON answer of `GET /v1/requests/{id}`."""
        end = self.state.end
        usage = end.usage if end is not None else None
        failure = end.failure if end is not None else None
        report = RequestReport(
            id=self.request_id,
            route=self.parsed.route,
            model=self.parsed.model,
            status=_status(end),
            created_unix_s=self.created_unix_s,
            finished_unix_s=self.ended_unix_s,
            first_token_unix_s=self.first_token_unix_s,
            num_resubmissions=self.state.num_resubmissions,
            usage=None if usage is None else RequestUsage(**msgspec.structs.asdict(usage)),
            error=None
            if failure is None
            else ErrorBody(
                message=failure.message if failure.status < 500 else "The request failed.",
                type=failure.error_type,
                param=failure.param,
                code=failure.code,
            ),
            steps=tuple(self.state.timeline.rows.values()),
            media=tuple(self.state.timeline.media.values()),
        )
        return msgspec.json.encode(report)


def _status(end: End | None) -> str:
    if end is None:
        return "running"
    if end.usage is not None:
        return "finished"
    return "failed" if end.failure is not None else "cancelled"
