"""One training loop for every part of the image model: seeded by step, averaged weights, checkpoints, resumable."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_models.training import say

EMA_DECAY = 0.998
WARMUP_STEPS = 60
SAY_EVERY_STEPS = 25


@dataclass(frozen=True, slots=True)
class Stage:
    """What is trained and how.

    loss: step -> scalar loss; draws whatever it needs from a generator seeded by the step, so that a resumed run sees
    the batches an unbroken one would have seen. report: called with the step while the module holds its averaged
    weights; returns a few words for the log.
    """

    name: str
    module: Any
    num_steps: int
    max_learning_rate: float
    loss: Callable[[int], Any]
    report: Callable[[int], str]
    report_every_steps: int


def generator_for(seed: int, name: str, step: int) -> Any:
    """A torch generator that depends only on its arguments."""
    import hashlib

    import torch

    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def run_stage(stage: Stage, state_folder: Path) -> None:
    """Train from the last checkpoint to the end; on return the module holds the averaged weights."""
    import torch

    module = stage.module.train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=stage.max_learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    average = [p.detach().clone() for p in parameters]
    done = _restore(stage, state_folder, parameters, average, optimizer)
    started_s = time.monotonic()
    for step in range(done + 1, stage.num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = stage.max_learning_rate * learning_rate_part(step, stage.num_steps)
        loss = stage.loss(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(EMA_DECAY, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - decay)
        if step % SAY_EVERY_STEPS == 0:
            rate = (step - done) / (time.monotonic() - started_s)
            say(f"{stage.name} step {step}/{stage.num_steps} loss {loss.item():.4f} {rate:.2f} steps/s")
        if step % stage.report_every_steps == 0 or step == stage.num_steps:
            _save(stage, state_folder, step, parameters, average, optimizer)
            kept = [p.detach().clone() for p in parameters]
            _assign(parameters, average)
            module.eval()
            say(f"{stage.name} step {step}: {stage.report(step)}")
            module.train()
            _assign(parameters, kept)
    _assign(parameters, average)
    module.eval()


def learning_rate_part(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine down to a fiftieth."""
    warm = min(1.0, step / WARMUP_STEPS)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))


def _assign(parameters: list[Any], values: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _save(stage: Stage, folder: Path, step: int, parameters: list[Any], average: list[Any], optimizer: Any) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        tensors |= {
            f"{i}.value": parameter.detach().contiguous(),
            f"{i}.average": average[i].contiguous(),
            f"{i}.exp_avg": state["exp_avg"].contiguous(),
            f"{i}.exp_avg_sq": state["exp_avg_sq"].contiguous(),
        }
    partial = folder / f".{stage.name}.partial"
    save_file(tensors, partial, metadata={"step": json.dumps(step)})
    partial.replace(folder / f"{stage.name}.safetensors")


def _restore(stage: Stage, folder: Path, parameters: list[Any], average: list[Any], optimizer: Any) -> int:
    """Fill everything from a checkpoint; returns the step it was written after, 0 if there is none."""
    import torch
    from safetensors import safe_open

    path = folder / f"{stage.name}.safetensors"
    if not path.is_file():
        return 0
    with safe_open(path, "pt") as tensors:
        step = int(json.loads(tensors.metadata()["step"]))
        _assign(parameters, [tensors.get_tensor(f"{i}.value") for i in range(len(parameters))])
        for i, parameter in enumerate(parameters):
            average[i] = tensors.get_tensor(f"{i}.average").clone(memory_format=torch.preserve_format)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors.get_tensor(f"{i}.exp_avg"),
                "exp_avg_sq": tensors.get_tensor(f"{i}.exp_avg_sq"),
            }
    say(f"{stage.name}: resumed after step {step}/{stage.num_steps}")
    return step
