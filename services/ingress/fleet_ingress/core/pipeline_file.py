"""A pipeline as its file has it, checked; every fault names the line. Pure.

A pipeline is steps at stages, each with a model and inputs: `input.<name>` is what the client sent, `<step>.<output>`
what an earlier step made. Its outputs are the answer.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from fleet_contracts.base import Modality
from fleet_ingress.api.common import MAX_STOP_STRINGS, Int64, TokenCount
from fleet_ingress.api.images import Guidance, Steps
from fleet_ingress.core.yaml_lines import Document, Place, YamlFault, read_yaml

MAX_STEPS = 16

_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_STEP_ID = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_PLACED = re.compile(r"^(?P<reason>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*?)`", re.DOTALL)
_PATH_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

#: What clients send that is no medium: the whole conversation, and what of it comes before the last message.
MESSAGES, HISTORY = "messages", "history"

MediumName = Literal["text", "image", "audio"]


class _Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a step; what is absent is the model's own."""


class TranscribeParams(_Params, frozen=True, kw_only=True):
    """Of `transcribe`, as `/v1/audio/transcriptions` has them."""

    language: str | None = None
    prompt: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None


class ChatParams(_Params, frozen=True, kw_only=True):
    """Of `chat`: two of our own, and what `/v1/chat/completions` has.

    Attributes:
        system: the system message.
        prompt: what the model is told; `{text}` stands for the input.
    """

    system: str | None = None
    prompt: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] | None = None
    seed: Int64 | None = None
    stop: Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] | None = None


class DrawParams(_Params, frozen=True, kw_only=True):
    """Of `draw`, as `/v1/images/generations` has them; `prompt`: as of `chat`."""

    prompt: str | None = None
    size: str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    steps: Steps | None = None
    guidance: Guidance | None = None
    negative_prompt: str | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None


class SpeakParams(_Params, frozen=True, kw_only=True):
    """Of `speak`, as `/v1/audio/speech` has them."""

    voice: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4.0)] | None = None


StepParams = TranscribeParams | ChatParams | DrawParams | SpeakParams


class _Stage(msgspec.Struct, frozen=True):
    """What a stage takes (input -> whether it must be there) and gives."""

    takes: dict[str, bool]
    gives: str
    params: type[_Params]


STAGES: dict[str, _Stage] = {
    "transcribe": _Stage({"audio": True}, "text", TranscribeParams),
    "chat": _Stage({"text": False, "image": False, HISTORY: False, MESSAGES: False}, "text", ChatParams),
    "draw": _Stage({"text": True}, "image", DrawParams),
    "speak": _Stage({"text": True}, "audio", SpeakParams),
}


class _StepLines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step as it is written."""

    id: str
    stage: str
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    inputs: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    params: dict[str, Any] = {}
    stream: list[str] = []


class _FileLines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file as it is written."""

    pipeline: str
    inputs: Annotated[list[MediumName], msgspec.Meta(min_length=1)]
    steps: Annotated[list[_StepLines], msgspec.Meta(min_length=1, max_length=MAX_STEPS)]
    outputs: Annotated[dict[MediumName, str], msgspec.Meta(min_length=1)]
    description: str = ""


class Source(msgspec.Struct, frozen=True):
    """Where an input comes from: `step` "" is the client."""

    step: str
    name: str


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A checked step. `streamed`: inputs taken while they are still being written."""

    id: str
    stage: str
    model: str
    inputs: dict[str, Source]
    params: StepParams
    streamed: frozenset[str] = frozenset()


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A checked pipeline; no step needs a later one. `line`: where its file says its name."""

    name: str
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: dict[str, Source]
    description: str = ""
    line: int = 1

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models it needs, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))

    @property
    def answering_step(self) -> str:
        """The last step that chats: what a request says about sampling is for it; "" when none does."""
        return next((step.id for step in reversed(self.steps) if step.stage == "chat"), "")

    @property
    def input_modalities(self) -> tuple[Modality, ...]:
        """What a client sends."""
        return tuple(Modality(name) for name in self.inputs)

    @property
    def output_modalities(self) -> tuple[Modality, ...]:
        """What it gets."""
        return tuple(Modality(name) for name in self.outputs)


class PipelineFault(Exception):
    """What is wrong with a file. `str()` is `FILE:LINE: reason`."""

    def __init__(self, filename: str, line: int, reason: str) -> None:
        super().__init__(f"{filename}:{line}: {reason}")
        self.line = line
        self.reason = reason


def read_pipeline(text: str, filename: str) -> Pipeline:
    """The pipeline a file holds. Raises PipelineFault."""
    try:
        document = read_yaml(text)
    except YamlFault as err:
        raise PipelineFault(filename, err.line, err.reason) from err
    return _Reader(filename, document).pipeline()


class _Reader:
    """One file being checked."""

    def __init__(self, filename: str, document: Document) -> None:
        self._filename = filename
        self._document = document
        self._made: dict[str, str] = {}
        self._read: set[Source] = set()

    def pipeline(self) -> Pipeline:
        lines = self._convert(self._document.value, _FileLines, ())
        if not _ID.fullmatch(lines.pipeline):
            raise self._fault(("pipeline",), "an id has small letters, digits, `.`, `_` and `-`, at most 63")
        steps = tuple(self._step(lines, number, step) for number, step in enumerate(lines.steps))
        outputs: dict[str, Source] = {}
        for name, reference in lines.outputs.items():
            place: Place = ("outputs", name)
            outputs[name] = self._source(reference, name, lines.inputs, place, what=f"the output `{name}`")
            if not outputs[name].step:
                raise self._fault(place, "an output is what a step made")
        self._check_all_read(lines)
        return Pipeline(
            name=lines.pipeline,
            inputs=tuple(dict.fromkeys(lines.inputs)),
            steps=steps,
            outputs=outputs,
            description=lines.description,
            line=self._document.line(("pipeline",)),
        )

    def _step(self, lines: _FileLines, number: int, written: _StepLines) -> Step:
        place: Place = ("steps", number)
        stage = STAGES.get(written.stage)
        if stage is None:
            raise self._fault((*place, "stage"), f"`stage` is one of: {', '.join(STAGES)}")
        if not _STEP_ID.fullmatch(written.id) or written.id == "input":
            raise self._fault((*place, "id"), "a step's id is a small letter, then small letters, digits, `_` and `-`")
        if written.id in self._made:
            raise self._fault((*place, "id"), f"there is a step `{written.id}` already")
        inputs: dict[str, Source] = {}
        for name, reference in written.inputs.items():
            where: Place = (*place, "inputs", name)
            if name not in stage.takes:
                raise self._fault(where, f"`{written.stage}` takes no `{name}`: it takes {', '.join(stage.takes)}")
            inputs[name] = self._source(reference, name, lines.inputs, where, what=f"`{name}`")
        self._check_inputs(written, place)
        streamed = self._streamed(lines, written, inputs, place)
        params = self._convert(written.params, stage.params, (*place, "params"))
        self._check_prompt(written, params, (*place, "params", "prompt"))
        self._made[written.id] = stage.gives
        return Step(
            id=written.id, stage=written.stage, model=written.model, inputs=inputs, params=params, streamed=streamed
        )

    def _check_inputs(self, written: _StepLines, place: Place) -> None:
        missing = [name for name, is_needed in STAGES[written.stage].takes.items() if is_needed]
        for name in missing:
            if name not in written.inputs:
                raise self._fault((*place, "inputs"), f"`{written.stage}` needs `{name}`")
        if written.stage != "chat":
            return
        if MESSAGES in written.inputs and len(written.inputs) > 1:
            raise self._fault((*place, "inputs", MESSAGES), "`messages` is the whole conversation: it comes alone")
        if not {MESSAGES, "text", "image"} & written.inputs.keys():
            raise self._fault((*place, "inputs"), "`chat` needs `text`, `image` or `messages`")

    def _streamed(
        self, lines: _FileLines, written: _StepLines, inputs: dict[str, Source], place: Place
    ) -> frozenset[str]:
        stages = {step.id: step.stage for step in lines.steps}
        for number, name in enumerate(written.stream):
            where: Place = (*place, "stream", number)
            if name not in inputs:
                raise self._fault(where, f"`{name}` is no input of this step")
            if written.stage != "speak" or stages.get(inputs[name].step) != "chat":
                raise self._fault(where, "only text that a `chat` step writes is streamed, and only into `speak`")
        return frozenset(written.stream)

    def _source(self, reference: str, wanted: str, declared: list[MediumName], place: Place, *, what: str) -> Source:
        step, dot, name = reference.partition(".")
        if not dot:
            raise self._fault(place, f"`{reference}` is neither `input.<name>` nor `<step>.<output>`")
        if step == "input":
            found = Source("", name)
            if name not in (*declared, MESSAGES, HISTORY):
                raise self._fault(place, f"`{name}` is not among the inputs of the pipeline")
            kind = name
        elif step not in self._made:
            raise self._fault(place, f"no step before this one is called `{step}`")
        else:
            found, kind = Source(step, name), self._made[step]
            if name != kind:
                raise self._fault(place, f"`{step}` gives `{kind}`, no `{name}`")
        if kind != wanted:
            raise self._fault(place, f"{what} cannot be `{reference}`: that is {kind}")
        self._read.add(found)
        return found

    def _check_prompt(self, written: _StepLines, params: StepParams, place: Place) -> None:
        prompt = params.prompt if isinstance(params, ChatParams | DrawParams) else None
        system = params.system if isinstance(params, ChatParams) else None
        if MESSAGES in written.inputs and (prompt is not None or system is not None):
            raise self._fault(place, "the conversation is taken as it is: no `prompt` and no `system`")
        if written.stage == "chat" and prompt is None and not {MESSAGES, "text"} & written.inputs.keys():
            raise self._fault((*place[:-2], "inputs"), "without `text` a step needs a `prompt` in its `params`")
        if prompt is not None and ("{text}" in prompt) != ("text" in written.inputs):
            raise self._fault(place, "`prompt` holds `{text}` when the step has an input `text`, and only then")

    def _check_all_read(self, lines: _FileLines) -> None:
        for number, name in enumerate(lines.inputs):
            if not {Source("", name), Source("", MESSAGES)} & self._read:
                raise self._fault(("inputs", number), f"no step takes `input.{name}`")
        for number, step in enumerate(lines.steps):
            if Source(step.id, self._made[step.id]) not in self._read:
                raise self._fault(("steps", number, "id"), f"nothing takes what `{step.id}` makes")

    def _convert(self, value: Any, kind: Any, base: Place) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as err:
            raise self._explained(str(err), base) from err

    def _explained(self, text: str, base: Place) -> PipelineFault:
        match = _PLACED.match(text)
        assert match is not None
        parts = _PATH_PART.findall(match["path"] or "")
        place: Place = (*base, *(int(index) if index else name for index, name in parts if name != "..."))
        named = _NAMED.match(match["reason"])
        if named is None:
            shown = f"`{place[-1]}`: " if place and isinstance(place[-1], str) else ""
            return self._fault(place, f"{shown}{match['reason']}")
        if named["what"] == "contains unknown":
            return self._fault((*place, named["name"]), f"unknown field `{named['name']}`")
        return self._fault(place, f"`{named['name']}` is missing")

    def _fault(self, place: Place, reason: str) -> PipelineFault:
        return PipelineFault(self._filename, self._document.line(place), reason)
