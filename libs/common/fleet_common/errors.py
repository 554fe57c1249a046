"""The error tree. Each class has a stable `code`; HTTP statuses live in the ingress only.

FleetError
├── RequestError                 the client's fault: term, 4xx
│   ├── InvalidInputError
│   ├── UnsupportedModalityError
│   └── ContextLengthError
├── OverloadError                shed: ack and fail fast, 429 / 504
│   ├── AdmissionRejectedError
│   └── DeadlineExceededError
├── DependencyError              heartbeat and wait, never nak
│   ├── BusError
│   │   ├── BusTimeoutError
│   │   ├── NoResponderError
│   │   ├── QueueFullError       a work stream refused a publish
│   │   └── RevisionConflictError   a compare-and-set lost
│   └── StoreError
│       └── StoreFullError       no room: spill or refuse
├── TensorNotFoundError          republish the producing step, ack
├── EngineError                  nak
│   ├── EngineOutOfMemoryError   split the batch first
│   └── EngineDeadError          drain this worker
├── CancelledWorkError           the request is over for its client: ack, nothing to tell
└── ContractError                bytes that are no message of ours: term and dead-letter
"""

from __future__ import annotations

from fleet_contracts.tensors import TensorRef


class FleetError(Exception):
    """Base of every error the fleet raises on purpose."""

    code = "internal_error"


class RequestError(FleetError):
    """The request itself is wrong; trying again gives the same answer.

    Attributes:
        param: the field or part at fault, like `messages[0].content[1].image_url`; None when it is the whole.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidInputError(RequestError):
    """A field or media part is malformed or out of bounds."""

    code = "invalid_input"


class UnsupportedModalityError(RequestError):
    """The model cannot take that kind of part."""

    code = "unsupported_modality"


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"


class OverloadError(FleetError):
    """The fleet refuses work it could not finish in time.

    Attributes:
        retry_after_s: when trying again makes sense.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdmissionRejectedError(OverloadError):
    """Refused before any work was done."""

    code = "rate_limit_exceeded"


class DeadlineExceededError(OverloadError):
    """The request's deadline passed before it was finished."""

    code = "deadline_exceeded"


class DependencyError(FleetError):
    """Something the fleet stands on is out of reach for now."""

    code = "dependency_unavailable"


class BusError(DependencyError):
    """The broker did not do what was asked."""

    code = "bus_unavailable"


class BusTimeoutError(BusError):
    """No answer within the time given."""

    code = "bus_timeout"


class NoResponderError(BusError):
    """Nobody listens on that subject."""

    code = "bus_no_responder"


class QueueFullError(BusError):
    """The stage's stream is full and refused the message."""

    code = "queue_full"


class RevisionConflictError(BusError):
    """Another writer changed the key first."""

    code = "revision_conflict"


class StoreError(DependencyError):
    """The tensor store is out of reach."""

    code = "tensor_store_unavailable"


class StoreFullError(StoreError):
    """No room for the tensor."""

    code = "tensor_store_full"


class TensorNotFoundError(FleetError):
    """The tensor is gone (evicted, expired, its host died, the store was flushed): derive it again.

    Attributes:
        ref: the reference that missed.
        step_id: the step that produced it, filled in by the stage runner.
    """

    code = "tensor_not_found"

    def __init__(self, ref: TensorRef, reason: str, *, step_id: str | None = None) -> None:
        super().__init__(f"tensor not found: {reason}")
        self.ref = ref
        self.step_id = step_id


class EngineError(FleetError):
    """The engine failed on this work."""

    code = "engine_error"


class EngineOutOfMemoryError(EngineError):
    """The batch does not fit; a smaller one may."""

    code = "engine_out_of_memory"


class EngineDeadError(EngineError):
    """The engine cannot run anything any more; the worker must be replaced."""

    code = "engine_dead"


class CancelledWorkError(FleetError):
    """Nobody waits for this work any longer."""

    code = "cancelled"


class ContractError(FleetError):
    """The bytes are not the message they should be."""

    code = "undecodable_message"
