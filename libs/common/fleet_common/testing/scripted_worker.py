"""`python -m fleet_common.testing.scripted_worker`: a whole worker process whose engine follows a script.

For tests with a real broker, where processes are killed and frozen. Requests steer the engine by their id:
`..._die` ends the process (`..._die-pre` only in that step), `..._raise` raises, `..._dead-dec` kills that step's
engine once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.errors import EngineDeadError
from fleet_common.settings import CommonSettings, WorkerSettings
from fleet_common.stage.host import run_worker
from fleet_common.stage.port import BatchEngine, Product, StepItem, StreamEngine
from fleet_common.testing.engines import Behaviour, ScriptedBatchEngine, ScriptedStreamEngine, default_product
from fleet_contracts.base import Stage
from fleet_contracts.control import ModelCard


class ScriptedSettings(WorkerSettings):
    """Environment `FLEET_SCRIPTED_<NAME>`."""

    model_config = SettingsConfigDict(
        env_prefix="FLEET_SCRIPTED_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    stage: Stage = Field(description="Stage this worker plays.")
    num_tokens: int = Field(20, description="Tokens per stream.")
    token_s: float = Field(0.0, description="Time per token.")
    batch_s: float = Field(0.0, description="Time per batch.")
    load_s: float = Field(0.0, description="Time to load the engine.")
    max_batch: int = Field(8, description="Steps per engine call.")


class _SlowToLoad(ScriptedBatchEngine):
    """Takes its time in `start`."""

    def __init__(
        self, behaviour: Behaviour, *, max_batch: int, gate: Callable[[], Awaitable[object]], load_s: float
    ) -> None:
        super().__init__(behaviour, max_batch=max_batch, gate=gate)
        self._load_s = load_s

    async def start(self) -> tuple[ModelCard, ...]:
        await asyncio.sleep(self._load_s)
        return await super().start()


def _behave(item: StepItem) -> Product:
    _obey(item)
    return default_product(item)


def _obey(item: StepItem) -> None:
    request_id = item.task.request_id
    if request_id.endswith("_die") or request_id.endswith(f"_die-{item.task.step_id}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if request_id.endswith("_raise"):
        raise RuntimeError("told to raise")
    if request_id.endswith(f"_dead-{item.task.step_id}") and item.attempt.delivery == 1:
        raise EngineDeadError("told to die")


def build_engine(settings: ScriptedSettings) -> BatchEngine | StreamEngine:
    """The engine of the settings' stage."""

    async def pause() -> None:
        if settings.batch_s > 0:
            await asyncio.sleep(settings.batch_s)

    async def before_token(item: StepItem, number: int) -> None:
        _obey(item)
        if settings.token_s > 0:
            await asyncio.sleep(settings.token_s)

    if settings.stage is Stage.DECODE:
        return ScriptedStreamEngine(settings.num_tokens, slots=settings.slots, before_token=before_token)
    return _SlowToLoad(_behave, max_batch=settings.max_batch, gate=pause, load_s=settings.load_s)


def main() -> None:
    """Serve until told to stop."""
    settings = ScriptedSettings()  # type: ignore[call-arg]
    run_worker(CommonSettings(), settings, settings.stage, build_engine(settings))


if __name__ == "__main__":
    main()
