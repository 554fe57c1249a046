"""`Idempotency-Key`: requests of one tenant with one key are one request; all of them get its answer.

The answer is recorded as it is made and does not depend on who listens: a client that leaves can come back for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from litestar.types import HTTPScope, Message, Send

from fleet_common.clock import Clock
from fleet_ingress.api.errors import ErrorBody
from fleet_ingress.errors import INVALID_REQUEST, ApiError, by_status
from fleet_ingress.routes.http import ClientGoneError, close_after_answer, header, send_json

log = structlog.get_logger(__name__)

KEY_PARAM = "Idempotency-Key"

_HEADER = b"idempotency-key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_REPLAYED = (b"idempotent-replayed", b"true")
#: How soon a follower whose client left, while nothing new comes, stops to follow.
_GONE_POLL_S = 1.0


def idempotency_key(scope: HTTPScope) -> str | None:
    """The client's key, None when it sent none. Raises ApiError (400)."""
    key = header(scope, _HEADER)
    if key is not None and not _KEY.fullmatch(key):
        raise _refusal("`Idempotency-Key` has 1 to 255 visible ASCII characters.", "invalid_idempotency_key")
    return key


def fingerprint(operation: str, body: bytes) -> bytes:
    """What has to be the same when a key is used again."""
    return hashlib.sha256(operation.encode() + b"\0" + body).digest()


@dataclass(slots=True)
class Recording:
    """One answer while it is made, and after.

    Attributes:
        status, headers: None and empty until the answer has begun.
        is_broken: the answer ends without being whole; the connection has to close.
        ended_s: monotonic seconds, None while it is being made.
    """

    fingerprint: bytes
    status: int | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    is_broken: bool = False
    ended_s: float | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_worth_keeping(self) -> bool:
        """A fault of ours is not: the next request with the key tries again."""
        return self.status is not None and self.status < 500 and self.status != 429 and not self.is_broken

    async def send(self, message: Message) -> None:
        """ASGI `send` of whoever makes the answer."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            self.body += message["body"]
        self._tell()

    @property
    def _tells_its_end(self) -> bool:
        """Whether a reader of the answer sees that it is not whole."""
        is_event_stream = (b"content-type", b"text/event-stream") in self.headers
        return is_event_stream or any(name == b"content-length" for name, _ in self.headers)

    def break_off(self) -> None:
        """The answer that is sent is not whole."""
        self.is_broken = True

    def end(self, now_s: float) -> None:
        """Nothing more comes."""
        self.ended_s = now_s
        self._tell()

    async def replay(
        self, scope: HTTPScope, send: Send, write_timeout_s: float, is_gone: Callable[[], bool], *, is_first: bool
    ) -> None:
        """Send what there is, and what comes, to one client. Raises ClientGoneError."""
        position, has_begun = 0, False
        while True:
            news, is_over = self._news, self.ended_s is not None
            if is_gone():
                raise ClientGoneError
            if self.status is None and is_over:
                raise by_status(503)
            try:
                async with asyncio.timeout(write_timeout_s):
                    if self.status is not None and not has_begun:
                        has_begun = True
                        headers = [*self.headers, *([] if is_first else [_REPLAYED])]
                        await send({"type": "http.response.start", "status": self.status, "headers": headers})
                    piece = bytes(self.body[position:])
                    position += len(piece)
                    # A stream of events ends with an error; of anything else only the missing end can tell.
                    is_cut = self.is_broken and not self._tells_its_end
                    if is_over and self.is_broken:
                        close_after_answer(scope)
                    if piece or is_over:
                        await send({"type": "http.response.body", "body": piece, "more_body": not is_over or is_cut})
            except TimeoutError as err:
                raise ClientGoneError from err
            if is_over:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GONE_POLL_S):
                    await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class IdempotentAnswers:
    """Recordings by tenant and key, running and done; the oldest done ones make room.

    Args:
        ttl_s: how long an answer is kept.
        max_answers, max_bytes: of answers that are done.
    """

    def __init__(self, clock: Clock, *, ttl_s: float, max_answers: int, max_bytes: int) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._running: dict[tuple[str, str], Recording] = {}
        self._done: OrderedDict[tuple[str, str], Recording] = OrderedDict()
        self._done_bytes = 0
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers are made while the block runs; what is unfinished at its end is cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()

    def find(self, tenant: str, key: str, wanted: bytes) -> Recording | None:
        """The recording of that key. Raises ApiError (400) when it was used for something else."""
        self._forget_old()
        name = (tenant, key)
        recording = self._running.get(name) or self._done.get(name)
        if recording is not None and recording.fingerprint != wanted:
            raise _refusal("This `Idempotency-Key` was used with another request.", "idempotency_key_reused")
        return recording

    def start(self, tenant: str, key: str, wanted: bytes, make: Callable[[Recording], Awaitable[None]]) -> Recording:
        """Have the answer of a new key made by `make`, which sends it to the recording."""
        assert self._group is not None
        recording = self._running[tenant, key] = Recording(wanted)
        task = self._group.create_task(self._make((tenant, key), recording, make))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return recording

    async def _make(
        self, name: tuple[str, str], recording: Recording, make: Callable[[Recording], Awaitable[None]]
    ) -> None:
        try:
            await make(recording)
        except asyncio.CancelledError:
            recording.break_off()
            raise
        except Exception:
            # Stands where the web framework stands for other requests: a bug must not take the ingress down.
            log.exception("idempotent_request_failed")
            recording.break_off()
            if recording.status is None:
                error = by_status(500)
                await send_json(recording.send, error.envelope, [], error.status)
        finally:
            recording.end(self._clock.monotonic_s())
            del self._running[name]
            if recording.is_worth_keeping:
                self._done[name] = recording
                self._done_bytes += len(recording.body)
            self._forget_old()

    def _forget_old(self) -> None:
        oldest_s = self._clock.monotonic_s() - self._ttl_s
        while self._done:
            name, recording = next(iter(self._done.items()))
            is_old = recording.ended_s is not None and recording.ended_s < oldest_s
            if not is_old and len(self._done) <= self._max_answers and self._done_bytes <= self._max_bytes:
                return
            del self._done[name]
            self._done_bytes -= len(recording.body)


def _refusal(message: str, code: str) -> ApiError:
    return ApiError(400, ErrorBody(message=message, type=INVALID_REQUEST, param=KEY_PARAM, code=code))
