"""Train the vision tower and projector on rendered scenes.

The projected image tokens learn to equal the frozen language model's own input embeddings of the scene's
summary. Two more losses in the middle of the tower, on which pixels belong to something and on what each
patch is part of, are what makes a tower this small learn shapes at all; their heads are thrown away.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleet_models.pictures import SCENES_PER_CHUNK, Pictures, load_chunks
from fleet_models.smollm2 import prepare_smollm2
from fleet_models.targets import Batch, Vocabulary, load_vocabulary, make_batch, score, summary_loss
from fleet_models.tower import (
    PROJECTOR_PREFIX,
    TOWER_PREFIX,
    VISION_CONFIG,
    WEIGHTS_NAME,
    build_projector,
    build_tower,
    layer_states,
    normalise,
    start_patch_embedding,
)
from fleet_models.training import (
    Run,
    autocast,
    best_dtype,
    build_optimizers,
    rate_at,
    resume,
    save_state,
    say,
    use_idle_cores,
)

HELD_OUT_SEED_OFFSET = 10_000
HELD_OUT_CHUNKS = 1
SAVE_EVERY_STEPS = 200
REPORT_EVERY_STEPS = 50
MASK_LAYER, PART_LAYER = 2, 4  # of 6: later layers are free to forget where the edges were
MASK_LOSS_WEIGHT, PART_LOSS_WEIGHT, NOTHING_WEIGHT = 1.0, 0.6, 0.1
MASK_CELLS = 8  # per patch and axis


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to train."""

    seed: int
    num_chunks: int
    num_steps: int
    batch_size: int
    max_learning_rate: float


@dataclass(frozen=True, slots=True)
class Modules:
    """What is trained: tower and projector are kept, the heads are not."""

    tower: Any
    projector: Any
    heads: Any


def main() -> None:
    """Train and save from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--cache", type=Path, default=Path("models/cache"), help="folder of models, scenes and states")
    parser.add_argument("--chunks", type=int, default=64, help=f"of {SCENES_PER_CHUNK} scenes")
    parser.add_argument("--steps", type=int, default=3_600)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--max-learning-rate", type=float, default=1e-3)
    parser.add_argument("--start-from", type=Path, help="weights of an earlier run, to train on from")
    args = parser.parse_args()
    settings = Settings(
        seed=args.seed,
        num_chunks=args.chunks,
        num_steps=args.steps,
        batch_size=args.batch_size,
        max_learning_rate=args.max_learning_rate,
    )
    train(settings, args.cache, args.out, start_from=args.start_from)


def train(settings: Settings, cache: Path, out: Path, *, start_from: Path | None = None) -> None:
    """Render, train and save: vision.safetensors (float16) and vision.json (what was measured).

    An interrupted run goes on from its last saved state in `cache`.
    """
    import torch

    vocabulary = load_vocabulary(prepare_smollm2(cache, say))
    torch.set_num_threads(1)  # more as soon as cores are idle
    torch.manual_seed(settings.seed)
    modules = build_modules()
    if start_from is not None:
        load_weights(modules, start_from)
    chunks = load_chunks(cache, settings.seed, settings.num_chunks)
    held_out = make_batch(load_chunks(cache, settings.seed + HELD_OUT_SEED_OFFSET, HELD_OUT_CHUNKS), None, vocabulary)
    time_s = _run_steps(settings, modules, vocabulary, (chunks, held_out), cache / "vision-state.pt")
    save_weights(modules, out)
    report = {
        "seed": settings.seed,
        "num_scenes": settings.num_chunks * SCENES_PER_CHUNK,
        "num_steps": settings.num_steps,
        "batch_size": settings.batch_size,
        "held_out": held_out_scores(modules, held_out, vocabulary),
        "training_time_s": round(time_s),
    }
    (out / "vision.json").write_text(json.dumps(report, indent=2) + "\n")
    say(json.dumps(report))


def build_modules() -> Modules:
    """Fresh modules; position embeddings start wide (0.2), or the first minutes go by without any order."""
    import torch

    from fleet_models.pictures import NO_COLOUR, NO_KIND

    tower = build_tower()
    tower.set_attn_implementation("eager")  # the fused one is several times slower to differentiate on CPUs
    start_patch_embedding(tower)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if "position_embedding" in name:
                parameter.normal_(0.0, 0.2)
    hidden = VISION_CONFIG["hidden_size"]
    heads = torch.nn.ModuleDict(
        {
            "mask": torch.nn.Linear(hidden, MASK_CELLS**2),
            "kind": torch.nn.Linear(hidden, NO_KIND + 1),
            "colour": torch.nn.Linear(hidden, NO_COLOUR + 1),
        }
    )
    return Modules(tower, build_projector(), heads)


def _run_steps(
    settings: Settings, modules: Modules, vocabulary: Vocabulary, data: tuple[list[Pictures], Batch], state_path: Path
) -> float:
    """Optimise; returns the seconds spent. The state is saved every SAVE_EVERY_STEPS."""
    import torch

    chunks, held_out = data
    trained = torch.nn.ModuleList([modules.tower, modules.projector, modules.heads])
    rate, num_steps = settings.max_learning_rate, settings.num_steps
    optimizers = build_optimizers(trained, rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(rate_at, num_steps=num_steps)) for o in optimizers]
    generator = torch.Generator().manual_seed(settings.seed)
    first, spent_s = resume(state_path, settings, Run(trained, optimizers, schedules, generator))
    started_s = time.monotonic() - spent_s
    for step in range(first + 1, num_steps + 1):
        batch = _draw_batch(chunks, settings.batch_size, generator, vocabulary)
        loss = _batch_loss(batch, modules, vocabulary)
        trained.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for stepped in (*optimizers, *schedules):
            stepped.step()
        if step % REPORT_EVERY_STEPS == 0:
            line = f"step {step}/{num_steps} loss {loss.item():.4f} {time.monotonic() - started_s:.0f} s"
            if step % SAVE_EVERY_STEPS == 0:
                spent_s = time.monotonic() - started_s
                save_state(state_path, settings, (step, spent_s), Run(trained, optimizers, schedules, generator))
                line += f" held-out {held_out_scores(modules, held_out, vocabulary)}"
            say(line)
            use_idle_cores()
    return time.monotonic() - started_s


def _draw_batch(chunks: list[Pictures], batch_size: int, generator: Any, vocabulary: Vocabulary) -> Batch:
    """Choose pictures; half of the shape scenes are mirrored."""
    import torch

    chosen = torch.randint(len(chunks) * SCENES_PER_CHUNK, (batch_size,), generator=generator)
    return make_batch(chunks, chosen, vocabulary, mirror=generator)


def _batch_loss(batch: Batch, modules: Modules, vocabulary: Vocabulary) -> Any:
    import torch.nn.functional as F

    heads = modules.heads
    with autocast():
        states = layer_states(modules.tower, normalise(batch.patches, best_dtype()))
        embeddings = modules.projector(states[-1][:, 1:])
        mask = heads["mask"](states[MASK_LAYER][:, 1:])
        kind = heads["kind"](states[PART_LAYER][:, 1:])
        colour = heads["colour"](states[MASK_LAYER][:, 1:])
    mask_loss = F.binary_cross_entropy_with_logits(mask.float(), batch.cells)
    kind_loss = _part_loss(kind, batch.part_kinds)
    colour_loss = _part_loss(colour, batch.part_colours)
    parts = MASK_LOSS_WEIGHT * mask_loss + PART_LOSS_WEIGHT * (kind_loss + colour_loss)
    return summary_loss(embeddings.float(), batch, vocabulary) + parts


def _part_loss(logits: Any, targets: Any) -> Any:
    """Cross-entropy of what patches are part of; the last class, nothing, is most of them and counts little."""
    import torch
    import torch.nn.functional as F

    weights = torch.ones(logits.shape[-1])
    weights[-1] = NOTHING_WEIGHT
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), weight=weights)


def held_out_scores(modules: Modules, batch: Batch, vocabulary: Vocabulary) -> dict[str, float]:
    """The part of pictures read right, by what is read; float32, as the model is served."""
    import torch

    found = []
    with torch.no_grad():
        for part in batch.patches.split(100):
            found.append(modules.projector(layer_states(modules.tower, normalise(part, torch.float32))[-1][:, 1:]))
    return score(torch.cat(found), batch, vocabulary)


def save_weights(modules: Modules, out: Path) -> None:
    """Write both modules as one float16 file, with the names they have in a LLaVA checkpoint."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    named = {TOWER_PREFIX + name: value for name, value in modules.tower.state_dict().items()}
    named |= {PROJECTOR_PREFIX + name: value for name, value in modules.projector.state_dict().items()}
    weights = {name: value for name, value in named.items() if value.is_floating_point()}
    halves = {name: value.to(torch.float16).contiguous() for name, value in weights.items()}
    save_file(halves, out / WEIGHTS_NAME, metadata={"format": "pt"})
    (out / WEIGHTS_NAME).chmod(0o644)


def load_weights(modules: Modules, path: Path) -> None:
    """Fill tower and projector from a file that save_weights wrote."""
    from safetensors.torch import load_file

    weights = load_file(path)
    for module, prefix in ((modules.tower, TOWER_PREFIX), (modules.projector, PROJECTOR_PREFIX)):
        own = {n.removeprefix(prefix): v.float() for n, v in weights.items() if n.startswith(prefix)}
        module.load_state_dict(own, strict=False)  # position_ids is a buffer, not a weight


if __name__ == "__main__":
    main()
