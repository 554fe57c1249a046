"""From a request to its graph of steps.

pre ──► dec, or with media pre ──► enc0, enc1, ... ──► dec: one encode step per picture, video or recording; they run
side by side and a lost one is encoded again alone; one step per kind when the client asks for serial execution. To
count tokens: pre alone. For embeddings: pre ──► dec with other parameters, whose answer is a tensor. Transcripts:
pre ──► hear; speech: speak alone. To draw: gen alone; to edit: pre ──► gen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from fleet_contracts.audio import SpeakParams, TranscribeParams
from fleet_contracts.base import Modality, Stage, StepId
from fleet_contracts.decode import DecodeParams
from fleet_contracts.diffusion import EditParams
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams
from fleet_contracts.work import Plan, PlanStep
from fleet_ingress.core.parsed import ParsedRequest

EncodeParams = VisionParams | VideoEncodeParams | AudioEncodeParams

_ENCODE_PARAMS: Mapping[Modality, type[EncodeParams]] = {
    Modality.IMAGE: VisionParams,
    Modality.VIDEO: VideoEncodeParams,
    Modality.AUDIO: AudioEncodeParams,
}

_PRE = StepId("pre")
_DEC = StepId("dec")
_GEN = StepId("gen")
_HEAR = StepId("hear")
_SPEAK = StepId("speak")


def make_plan(parsed: ParsedRequest, seed: int = 0) -> Plan:
    """The plan; its last step is the one whose tokens the client gets.

    Args:
        seed: for sampling that has to be repeated from its start when a worker dies.
    """
    model = parsed.served_model
    if isinstance(parsed.pictures, EditParams):
        edit = parsed.pictures
        files = PlanStep(step_id=_PRE, stage=Stage.PREPROCESS, model=model, params=parsed.preprocess)
        gen = PlanStep(step_id=_GEN, stage=Stage.DIFFUSION_GENERATE, model=model, params=edit, needs=(_PRE,))
        return Plan(steps=(files, gen))
    if parsed.pictures is not None:
        gen = PlanStep(step_id=_GEN, stage=Stage.DIFFUSION_GENERATE, model=model, params=parsed.pictures)
        return Plan(steps=(gen,))
    pre = PlanStep(step_id=_PRE, stage=Stage.PREPROCESS, model=model, params=parsed.preprocess)
    if parsed.is_count:
        return Plan(steps=(pre,))
    if isinstance(parsed.audio, TranscribeParams):
        hear = PlanStep(step_id=_HEAR, stage=Stage.AUDIO_TRANSCRIBE, model=model, params=parsed.audio, needs=(_PRE,))
        return Plan(steps=(pre, hear))
    if isinstance(parsed.audio, SpeakParams):
        return Plan(steps=(PlanStep(step_id=_SPEAK, stage=Stage.AUDIO_SPEAK, model=model, params=parsed.audio),))
    if parsed.embed is not None:
        embed = PlanStep(step_id=_DEC, stage=Stage.DECODE, model=model, params=parsed.embed, needs=(_PRE,))
        return Plan(steps=(pre, embed))
    encodes = tuple(
        PlanStep(
            step_id=StepId(f"enc{params.items[0]}"),
            stage=Stage.VISION_ENCODE,
            model=model,
            params=params,
            needs=(_PRE,),
        )
        for params in _encode_params(parsed)
    )
    decode_needs = (_PRE, *(step.step_id for step in encodes))
    return Plan(
        steps=(
            pre,
            *encodes,
            PlanStep(
                step_id=_DEC,
                stage=Stage.DECODE,
                model=model,
                params=_repeatable(parsed.decode, seed),
                needs=decode_needs,
            ),
        )
    )


def _encode_params(parsed: ParsedRequest) -> Iterator[EncodeParams]:
    """One per encode step."""
    if not parsed.is_serial:
        yield from (_params_of(part.kind, (index,)) for index, part in enumerate(parsed.media))
        return
    for kind in dict.fromkeys(part.kind for part in parsed.media):
        yield _params_of(kind, tuple(index for index, part in enumerate(parsed.media) if part.kind is kind))


def _params_of(kind: Modality, items: tuple[int, ...]) -> EncodeParams:
    return _ENCODE_PARAMS[kind](items=items)


def _repeatable(params: DecodeParams, seed: int) -> DecodeParams:
    """A grammar has a state, so the next worker begins again: without a seed it would say something else."""
    is_free = params.seed is None and params.temperature > 0.0
    return msgspec.structs.replace(params, seed=seed) if params.response_schema and is_free else params
