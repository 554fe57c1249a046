"""What the training scripts need: progress, the fastest number format of this CPU, and states to go on from."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def say(line: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(line, flush=True)


def best_dtype() -> Any:
    """bfloat16 where the CPU multiplies it in hardware (AMX: nine times float32, AVX512-BF16: three), else float32."""
    import torch

    checks = (getattr(torch.cpu, name, bool) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return torch.bfloat16 if any(check() for check in checks) else torch.float32


def use_idle_cores() -> None:
    """Let torch use the cores that nobody else kept busy in the last minute, at least one."""
    import torch

    others = os.getloadavg()[0] - torch.get_num_threads()
    torch.set_num_threads(max(1, round(len(os.sched_getaffinity(0)) - max(0.0, others))))


def autocast() -> Any:
    """A context in which matrix products are computed in the best dtype."""
    import torch

    dtype = best_dtype()
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)


def rate_at(step: int, num_steps: int, *, warmup_steps: int = 100, decay_part: float = 0.3) -> float:
    """Part of the full learning rate: up, flat, then down to nothing over the last `decay_part` of all steps.

    The flat part does not depend on `num_steps`, so a run can be made longer or shorter while it is there.
    """
    left = (num_steps - step) / (decay_part * num_steps)
    return max(0.0, min(1.0, (step + 1) / warmup_steps, left))


@dataclass(frozen=True, slots=True)
class Run:
    """What changes while training goes on."""

    module: Any
    optimizers: Sequence[Any]
    schedules: Sequence[Any]
    generator: Any


def build_optimizers(module: Any, rate: float) -> list[Any]:
    """Muon for the matrices inside, which learns the same in fewer pictures than AdamW; AdamW for all else."""
    import torch

    named = dict(module.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and ("layers" in n or "linear" in n)]
    chosen = {id(p) for p in matrices}
    others = [p for p in named.values() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.05, betas=(0.9, 0.98)),
    ]


def save_state(path: Path, settings: Any, progress: tuple[int, float], run: Run) -> None:
    """Write everything a run needs to go on; `progress` is (steps done, seconds spent)."""
    import torch

    state = {
        "settings": dataclasses.asdict(settings),
        "progress": progress,
        "module": run.module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "generator": run.generator.get_state(),
    }
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)  # noqa: PTH105


def resume(path: Path, settings: Any, run: Run) -> tuple[int, float]:
    """Take up a run with the same settings, whatever its length; returns (steps done, seconds spent), else zeros."""
    import torch

    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    steps, spent_s = state["progress"]
    if {**state["settings"], "num_steps": 0} != {**dataclasses.asdict(settings), "num_steps": 0}:
        return 0, 0.0
    if steps >= settings.num_steps:
        return 0, 0.0
    run.module.load_state_dict(state["module"])
    for optimizer, schedule, values in zip(run.optimizers, run.schedules, state["optimizers"], strict=True):
        optimizer.load_state_dict(values)
        schedule.last_epoch = steps
    run.generator.set_state(state["generator"])
    return int(steps), float(spent_s)
