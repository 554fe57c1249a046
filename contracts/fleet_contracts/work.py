"""The one work message of all stages, and the plan that travels with it."""

from __future__ import annotations

from fleet_contracts.audio import SpeakParams, TranscribeParams
from fleet_contracts.base import ANY_LANE, Contract, IngressId, PriorityClass, RequestId, Stage, StepId
from fleet_contracts.decode import DecodeParams
from fleet_contracts.diffusion import DiffusionParams, EditParams
from fleet_contracts.embed import EmbedParams, EmbedResult
from fleet_contracts.preprocess import PreprocessParams, PreprocessResult
from fleet_contracts.tensors import TensorRef
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams, VisionResult

#: A work message above this is refused by its publisher: bytes belong in the tensor store.
MAX_TASK_BYTES = 64 * 1024

#: Epochs are compared as numbers. A repair (tensor miss) adds 1; the strides keep the three causes apart, so that a
#: mover's copy and a repair of the same step can never share a message id and swallow each other.
REPAIR_STRIDE = 1
MOVE_STRIDE = 1 << 10
RESUBMIT_STRIDE = 1 << 20

StepParams = (
    PreprocessParams
    | VisionParams
    | AudioEncodeParams
    | VideoEncodeParams
    | DecodeParams
    | DiffusionParams
    | TranscribeParams
    | SpeakParams
    | EmbedParams
    | EditParams
)
StepResult = PreprocessResult | VisionResult | EmbedResult

#: Tags of step parameters that every release knows. A plan with any other goes only to workers that announce it
#: (`WorkerInfo.accepted_tags`): an older release could not even read the message.
FIRST_RELEASE_TAGS = frozenset(
    {
        "preprocess.v1",
        "vision_encode.v1",
        "decode.v1",
        "diffusion_generate.v1",
        "audio_transcribe.v1",
        "audio_speak.v1",
    }
)


class PlanStep(Contract, frozen=True, kw_only=True):
    """One node of a plan.

    Attributes:
        step_id: unique within the plan, like `pre`, `enc0`, `dec`.
        needs: steps whose outputs are this step's inputs, ancestors that are needed included.
    """

    step_id: StepId
    stage: Stage
    model: str
    params: StepParams
    needs: tuple[StepId, ...] = ()


class Plan(Contract, frozen=True, kw_only=True, tag="plan.v1"):
    """The graph of steps of one request. Order is topological; the last step is the terminal one."""

    steps: tuple[PlanStep, ...]

    def step(self, step_id: StepId) -> PlanStep:
        """The step of that id; KeyError if the plan has none."""
        for step in self.steps:
            if step.step_id == step_id:
                return step
        raise KeyError(step_id)

    @property
    def later_tags(self) -> frozenset[str]:
        """Tags of its parameters that the first release does not know."""
        return frozenset(str(step.params.__struct_config__.tag) for step in self.steps) - FIRST_RELEASE_TAGS

    def successors(self, step_id: StepId) -> tuple[PlanStep, ...]:
        """Steps that need `step_id`, in plan order."""
        return tuple(step for step in self.steps if step_id in step.needs)


class StepOutput(Contract, frozen=True, kw_only=True):
    """What a finished step hands to the steps that need it.

    Attributes:
        epoch: the epoch the step ran at.
        tensors: by name, see the stage's contract module.
        result: small typed facts.
    """

    step_id: StepId
    epoch: int
    tensors: dict[str, TensorRef] = {}
    result: StepResult | None = None


class EventAddress(Contract, frozen=True, kw_only=True):
    """Where events of a request go: chosen by the ingress, see `subjects.event`."""

    ingress_id: IngressId
    nonce: str


class StepTask(Contract, frozen=True, kw_only=True, tag="step_task.v1"):
    """One attempt-independent work item: a step of a request at one epoch.

    Attributes:
        epoch: 0 at first; every intentional republish increases it.
        inputs: outputs of ancestors by step id; at least those in the step's `needs`.
        root: what the client sent (JSON body as uint8 [nbytes]), so that any step can be derived again.
        deadline_unix_s: wall-clock second after which the work is worthless.
        enqueued_unix_s: wall-clock second of this publish: queue age counts from here.
        lane: `any`, or `w-<worker>`.
        solo: run alone in its batch: a copy republished after deaths in company. Deliveries of such a copy count
            solo deaths only.
        is_job: outlives its ingress (durable job).
        trace: W3C trace context (`traceparent`, `tracestate`).
    """

    request_id: RequestId
    step_id: StepId
    epoch: int
    plan: Plan
    model: str
    priority_class: PriorityClass
    tenant: str
    deadline_unix_s: float
    enqueued_unix_s: float
    events: EventAddress
    inputs: dict[str, StepOutput] = {}
    root: TensorRef | None = None
    lane: str = ANY_LANE
    solo: bool = False
    is_job: bool = False
    trace: dict[str, str] = {}

    @property
    def step(self) -> PlanStep:
        """This task's node in the plan."""
        return self.plan.step(self.step_id)


class TaskHead(Contract, frozen=True, kw_only=True, tag="step_task.v1"):
    """The part of a `StepTask` that every release can read, whatever its plan holds: enough to answer for it."""

    request_id: RequestId
    step_id: StepId
    epoch: int
    tenant: str
    deadline_unix_s: float
    events: EventAddress
    is_job: bool = False


class JoinRecord(Contract, frozen=True, kw_only=True, tag="join.v1"):
    """Finished inputs of a step with more than one incoming branch; kept in KV by compare-and-set.

    Attributes:
        inputs: latest output per step id; a re-encode (higher epoch) replaces its input.
    """

    inputs: dict[str, StepOutput] = {}


class Cancel(Contract, frozen=True, kw_only=True, tag="cancel.v1"):
    """Broadcast on `fleet.cancel`, and kept as a tombstone until the deadline."""

    request_id: RequestId
    reason: str
    deadline_unix_s: float


class DeadLetter(Contract, frozen=True, kw_only=True, tag="dead_letter.v1"):
    """A work item nobody could finish, with the reason; `payload` is the message as it was."""

    stage: Stage
    reason: str
    payload: bytes
    subject: str
    num_delivered: int = 0
    died_unix_s: float = 0.0
