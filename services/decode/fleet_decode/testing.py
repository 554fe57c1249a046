"""For tests and benchmarks of decode: steps as the runner hands them over, and a sink that keeps everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet_common.errors import CancelledWorkError
from fleet_common.stage.port import StepItem
from fleet_common.tensors.port import Array
from fleet_common.testing.steps import first_attempt
from fleet_contracts.base import Stage, StepId
from fleet_contracts.decode import DecodeParams, TokenLogprob
from fleet_contracts.embed import EmbedParams
from fleet_contracts.events import ChoiceProgress
from fleet_contracts.preprocess import PreprocessResult
from fleet_contracts.tensors import InlinePlace, TensorRef
from fleet_contracts.work import PlanStep, StepOutput


@dataclass
class Event:
    """One call of the sink."""

    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    stop_reason: str | None


@dataclass
class RecordingSink:
    """A TokenSink; `cancel_after` events it says that nobody waits any more."""

    progress: Sequence[ChoiceProgress] = ()
    cancel_after: int | None = None
    cancelled: bool = False
    events: list[Event] = field(default_factory=list)

    async def tokens(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
        stop_reason: str | None = None,
    ) -> None:
        if self.is_cancelled:
            raise CancelledWorkError("gone")
        self.events.append(Event(choice, tuple(token_ids), text, tuple(logprobs), finish_reason, stop_reason))

    async def chunk(self, media_type: str, data: bytes, *, is_last: bool = False) -> None:
        raise AssertionError("decode makes no media")

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled or (self.cancel_after is not None and len(self.events) >= self.cancel_after)

    def resume_point(self) -> Sequence[ChoiceProgress]:
        return self.progress

    def of(self, choice: int = 0) -> list[Event]:
        """Events of a choice."""
        return [event for event in self.events if event.choice == choice]

    def text(self, choice: int = 0) -> str:
        """Text of a choice."""
        return "".join(event.text for event in self.of(choice))

    def ids(self, choice: int = 0) -> list[int]:
        """Ids of a choice."""
        return [token_id for event in self.of(choice) for token_id in event.token_ids]

    def finish(self, choice: int = 0) -> tuple[str | None, str | None]:
        """Finish and stop reason of a choice's last event."""
        return (self.of(choice)[-1].finish_reason, self.of(choice)[-1].stop_reason)

    def progress_after(self, num_events: int, choice: int = 0) -> ChoiceProgress:
        """What an ingress would answer to a claim after that many events of a choice."""
        kept = self.of(choice)[:num_events]
        return ChoiceProgress(
            token_ids=tuple(token_id for event in kept for token_id in event.token_ids),
            num_text_chars=sum(len(event.text) for event in kept),
            finish_reason=kept[-1].finish_reason if kept else None,
        )


def step_item(
    prompt: Sequence[int],
    params: DecodeParams,
    images: Sequence[Array] = (),
    request: str = "r1",
    num_prompt_tokens: int = 0,
) -> StepItem:
    """A decode step: prompt from `pre`, one `enc<i>` per image; 0 prompt tokens: `pre` does not tell."""
    tensors: dict[tuple[str, str], Array] = {("pre", "prompt"): np.asarray(prompt, dtype=np.int32)}
    inputs = {
        "pre": StepOutput(
            step_id=StepId("pre"),
            epoch=0,
            tensors={"prompt": _ref("int32", (len(prompt),))},
            result=PreprocessResult(num_prompt_tokens=num_prompt_tokens) if num_prompt_tokens else None,
        )
    }
    for i, image in enumerate(images):
        tensors[(f"enc{i}", f"embeds{i}")] = image
        ref = _ref("float32", image.shape, f"hash{i}-{request}")
        inputs[f"enc{i}"] = StepOutput(step_id=StepId(f"enc{i}"), epoch=0, tensors={f"embeds{i}": ref})
    return _item(request, params, inputs, tensors)


def embed_item(inputs: Sequence[Sequence[int]], params: EmbedParams | DecodeParams, request: str = "r1") -> StepItem:
    """A step that embeds: `prompt` and `lengths` from `pre`."""
    ids = [token_id for one in inputs for token_id in one]
    tensors: dict[tuple[str, str], Array] = {
        ("pre", "prompt"): np.asarray(ids, dtype=np.int32),
        ("pre", "lengths"): np.asarray([len(one) for one in inputs], dtype=np.int32),
    }
    return _item(request, params, {}, tensors)


def _item(
    request: str,
    params: DecodeParams | EmbedParams,
    inputs: dict[str, StepOutput],
    tensors: dict[tuple[str, str], Array],
) -> StepItem:
    step = PlanStep(step_id=StepId("dec"), stage=Stage.DECODE, model="m", params=params)
    return first_attempt(step, request_id=request, worker_id="d0", tensors=tensors, inputs=inputs, deadline_unix_s=0.0)


def _ref(dtype: str, shape: tuple[int, ...], content_hash: str = "") -> TensorRef:
    return TensorRef(place=InlinePlace(data=b""), dtype=dtype, shape=shape, nbytes=0, content_hash=content_hash)
