"""Models on a live fleet: what an operator wants served, and what became of it. Two records per model in one bucket.

Two, because they have two writers: whoever owns the workers never overwrites what the operator asked for.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from fleet_contracts.base import Contract, Stage


class ModelState(StrEnum):
    """Where a model stands. `gone`: it was unserved and nothing of it is left."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"
    GONE = "gone"


class AdapterSpec(Contract, frozen=True, kw_only=True):
    """A LoRA adapter of a model.

    Attributes:
        name: what clients call it.
        path: folder on the hosts of the decode workers.
    """

    name: str
    path: str


class ModelSpec(Contract, frozen=True, kw_only=True, tag="model_spec.v1"):
    """A model somebody wants served, or no longer.

    Attributes:
        model: what clients call it.
        source: a local model's name, a Hugging Face id, or a folder on the hosts of the workers.
        generation: grows with each command about the model: the state of an older one is history.
        is_wanted: False: end what runs, take no more, leave nothing.
        replicas: workers per stage; a stage that is not named has as many as the fleet's settings say.
        engine_args: per stage, on top of the fleet's.
        adapters: LoRA adapters that can be asked for by name.
        takes_adapters: adapters may come later: the engine sets room aside.
    """

    model: str
    source: str
    generation: int
    is_wanted: bool = True
    replicas: dict[Stage, int] = {}
    engine_args: dict[Stage, dict[str, Any]] = {}
    adapters: tuple[AdapterSpec, ...] = ()
    takes_adapters: bool = False


class ModelStatus(Contract, frozen=True, kw_only=True, tag="model_status.v1"):
    """What became of a `ModelSpec`.

    Attributes:
        generation: of the spec this is about.
        error: why it failed, for people; "" otherwise.
        waits_for: what a load waits for, for people.
        adapters: those that can be asked for.
        adapter_errors: name -> why it cannot.
    """

    model: str
    generation: int
    state: ModelState
    since_unix_s: float
    error: str = ""
    waits_for: str = ""
    adapters: tuple[str, ...] = ()
    adapter_errors: dict[str, str] = {}
