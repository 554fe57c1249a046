"""Events of a request: what workers tell its ingress, and what the ingress answers.

Every attempt numbers its events from 0 (`Started`) without gaps, whatever the outcome: a step that fails before it ran
sends `Started`, `StepDone`, `Failed`. An event may arrive twice (kept events are published again when the connection is
back): a number seen already is dropped. While an attempt runs and has nothing to say it sends `Progress` with every
heartbeat, so silence after `Started` means that its worker is gone.
"""

from __future__ import annotations

from fleet_contracts.base import Contract, RequestId, Stage, StepId, WorkerId
from fleet_contracts.decode import TokenLogprob
from fleet_contracts.preprocess import MediaItem
from fleet_contracts.tensors import TensorRef

#: Bytes of media in one `Chunk`: with its surroundings it stays below what a work message may have.
MAX_CHUNK_BYTES = 48 * 1024


class Attempt(Contract, frozen=True, kw_only=True):
    """Which attempt speaks: the fence is (epoch, delivery), compared as a pair.

    Attributes:
        delivery: the broker's delivery count of the work item, from 1.
    """

    request_id: RequestId
    step_id: StepId
    stage: Stage
    worker_id: WorkerId
    epoch: int
    delivery: int

    @property
    def fence(self) -> tuple[int, int]:
        """(epoch, delivery): a higher pair outranks every lower one."""
        return (self.epoch, self.delivery)


class Usage(Contract, frozen=True, kw_only=True):
    """Token counts of a whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Failure(Contract, frozen=True, kw_only=True):
    """Why a request or step failed.

    Attributes:
        error_type: OpenAI's error type (`invalid_request_error`, `server_error`, ...).
        code: stable machine-readable word.
        status: HTTP status the ingress should answer with.
        param: the field or part at fault, like `messages[0].content[1].image_url`.
    """

    error_type: str
    code: str
    message: str
    status: int
    param: str | None = None
    retry_after_s: float | None = None


class Started(Contract, frozen=True, kw_only=True, tag="started.v1"):
    """The attempt has claimed the step and runs it."""

    attempt: Attempt
    seq: int


class Token(Contract, frozen=True, kw_only=True, tag="token.v1"):
    """New tokens of one choice.

    Attributes:
        seq: position of this event in its attempt, from 0 (`Started`), without gaps.
        index: absolute index of the first of `token_ids` in the choice's output, from 0. An attempt that continues
            starts at the number of ids it claimed.
        token_ids: ids, also those whose text is still held back.
        text: text released by them, after what was released before; "" while held back (stop strings, split UTF-8).
        text_offset: characters of the choice released before this event.
        finish_reason: set in the choice's last event: `stop`, `length`, `tool_calls`.
        stop_reason: the stop string or token id that matched, as text.
    """

    attempt: Attempt
    seq: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    text_offset: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None


class Progress(Contract, frozen=True, kw_only=True, tag="progress.v1"):
    """Share of the step that is done, 0 to 1."""

    attempt: Attempt
    seq: int
    done_ratio: float


class Chunk(Contract, frozen=True, kw_only=True, tag="chunk.v1"):
    """A piece of streamed media: a sentence of speech, a passage of a transcript, or part of one.

    Attributes:
        data: at most `MAX_CHUNK_BYTES`; what is larger comes in several pieces.
        index: absolute index of the medium among those of the request, from 0. An attempt that continues starts at
            the number of whole ones it claimed.
        piece, num_pieces: which part of it this is. A client gets a medium once all its pieces are there, so that the
            next attempt can make it anew.
        is_last: no medium comes after this one, where that is known.
    """

    attempt: Attempt
    seq: int
    media_type: str
    data: bytes
    index: int = 0
    piece: int = 0
    num_pieces: int = 1
    is_last: bool = False


class Picture(Contract, frozen=True, kw_only=True, tag="picture.v1"):
    """A picture of one choice as a file in the tensor store (uint8 [nbytes]).

    Attributes:
        index: position among the pictures of the choice, from 0: partial ones, then the final one. Every attempt
            makes the same picture at the same position.
        media_type: like `image/png`.
        width, height: pixels.
        is_final: the last of the choice.
    """

    attempt: Attempt
    seq: int
    choice: int
    index: int
    media_type: str
    width: int
    height: int
    file: TensorRef
    is_final: bool = False


class StepDone(Contract, frozen=True, kw_only=True, tag="step_done.v1"):
    """One row of the request's timeline. Not fenced by token order: informative.

    Attributes:
        queued_unix_s, started_unix_s, finished_unix_s: wall-clock seconds.
        batch_size: items in the engine batch this step ran in (for decode: running sequences at its start).
        bytes_in, bytes_out: tensor bytes read from and written to the store.
        media: the media items as seen by this step.
    """

    attempt: Attempt
    seq: int
    pool: str
    queued_unix_s: float
    started_unix_s: float
    finished_unix_s: float
    batch_size: int = 1
    bytes_in: int = 0
    bytes_out: int = 0
    outcome: str = "ok"
    media: tuple[MediaItem, ...] = ()


class Finished(Contract, frozen=True, kw_only=True, tag="finished.v1"):
    """The request's successful end; confirmed by the ingress before the work item is acked.

    Attributes:
        num_tokens: per choice, ids sent in all attempts together: lets the ingress see a gap.
        outputs: tensors that are the answer, by name; the ingress reads them before it confirms, then frees them.
        num_chunks: media sent in all attempts together.
    """

    attempt: Attempt
    seq: int
    usage: Usage
    num_tokens: tuple[int, ...] = ()
    outputs: dict[str, TensorRef] = {}
    num_chunks: int = 0


class Failed(Contract, frozen=True, kw_only=True, tag="failed.v1"):
    """The request's unsuccessful end; confirmed like `Finished`."""

    attempt: Attempt
    seq: int
    failure: Failure


RequestEvent = Started | Token | Progress | Chunk | Picture | StepDone | Finished | Failed


class Claim(Contract, frozen=True, kw_only=True, tag="claim.v1"):
    """A decode attempt after the first asks to take the stream over (request/reply on the event subject).

    A worker that was frozen claims again for the attempts it runs: the holder of the fence itself is `granted`.
    """

    attempt: Attempt


class ChoiceProgress(Contract, frozen=True, kw_only=True):
    """What the ingress has of one choice.

    Attributes:
        token_ids: received so far, those held back included.
        num_text_chars: characters of text received.
        finish_reason: set when the choice is over.
        num_chunks: media received whole and without a gap (of the request: told with its first choice).
    """

    token_ids: tuple[int, ...] = ()
    num_text_chars: int = 0
    finish_reason: str | None = None
    num_chunks: int = 0


class ClaimReply(Contract, frozen=True, kw_only=True, tag="claim_reply.v1"):
    """Answer to `Claim`; the fence is raised before it is sent.

    Attributes:
        status: `granted`; `stale` (a higher attempt holds the stream: drop the work); `gone` (the request is over or
            unknown: drop the work).
        choices: progress per choice, for `granted`.
        fence_epoch: for `stale`, see `Confirm`.
    """

    status: str
    choices: tuple[ChoiceProgress, ...] = ()
    fence_epoch: int | None = None


class Confirm(Contract, frozen=True, kw_only=True, tag="confirm.v1"):
    """Answer to `Finished` and `Failed`.

    Attributes:
        status: `accepted`; `resend` (send again from `resend_from_seq`, then the terminal event again); `stale` or
            `gone` (drop the work).
        fence_epoch: for `stale`, the epoch of the attempt that holds the step. Is it the epoch of the attempt that is
            told so, then the holder runs another delivery of the same message: the worker must not ack it away.
    """

    status: str
    resend_from_seq: int = 0
    fence_epoch: int | None = None


class RootLost(Contract, frozen=True, kw_only=True, tag="root_lost.v1"):
    """A step can derive its inputs from nothing any more: the ingress should resubmit (request/reply, `Confirm`)."""

    attempt: Attempt


WorkerMessage = RequestEvent | Claim | RootLost
IngressReply = ClaimReply | Confirm


class TimelineQuery(Contract, frozen=True, kw_only=True, tag="timeline_query.v1"):
    """An ingress asks the ingress that owns a request about it (on `subjects.ask`)."""

    request_id: RequestId
    tenant: str


class TimelineReply(Contract, frozen=True, kw_only=True, tag="timeline_reply.v1"):
    """`body` is the JSON answer of `/v1/requests/{id}`; b"" when unknown or not this tenant's."""

    body: bytes = b""
