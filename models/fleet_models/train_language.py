"""Teach the language model to answer questions about summaries: a small adapter, trained on text alone.

In place of a picture stand the embeddings of its summary, a little noisy, so neither pictures nor the tower are
needed. Questions about one picture share its prefix: a mask lets each see the picture but not the others.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleet_models.adapter import add_adapter, save_adapter
from fleet_models.questions import PAIR_QUESTIONS, SYSTEM_PROMPTS, random_pairs
from fleet_models.scenes import Scene, random_scene
from fleet_models.small_talk import PROMPTS
from fleet_models.smollm2 import BOS_TOKEN, EOS_TOKEN, prepare_smollm2
from fleet_models.summary import summary_words
from fleet_models.training import Run, best_dtype, rate_at, resume, save_state, say, use_idle_cores

IGNORED = -100
SAVE_EVERY_STEPS = 20
NOISE = 0.12
QUESTIONS_PER_PICTURE = 8
SMALL_TALK_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to train."""

    seed: int
    num_steps: int
    rows_per_step: int
    max_learning_rate: float


@dataclass(slots=True)
class Row:
    """Token ids of one row of a batch; pieces of one conversation share `segment`, which may see `parent` too."""

    ids: list[int]
    labels: list[int]
    segments: list[int]
    positions: list[int]
    is_picture: list[bool]
    parent_of: dict[int, int]

    @classmethod
    def empty(cls) -> "Row":
        """A row without tokens."""
        return cls([], [], [], [], [], {})

    def add(self, ids: list[int], segment: int, *, start: int, learn: bool = False, is_picture: bool = False) -> int:
        """Append a piece that starts at position `start`; returns the position after it."""
        self.ids += ids
        self.labels += ids if learn else [IGNORED] * len(ids)
        self.segments += [segment] * len(ids)
        self.positions += range(start, start + len(ids))
        self.is_picture += [is_picture] * len(ids)
        return start + len(ids)


class Teacher:
    """Writes rows: conversations about random scenes, and small talk with the answers of the untrained model."""

    def __init__(self, tokenizer: Any, small_talk: list[tuple[str, str]], seed: int) -> None:
        """Use `tokenizer` for text and summary words alike."""
        self._tokenizer = tokenizer
        self._small_talk = small_talk
        self._rng = random.Random(seed)

    @property
    def rng(self) -> random.Random:
        """The source of everything random here."""
        return self._rng

    def row(self) -> Row:
        """Many questions after one picture; or conversations with the picture last, two pictures, none."""
        draw = self._rng.random()
        if draw < 0.35:
            return self._picture_first()
        row = Row.empty()
        for segment in range(3):
            if draw < 0.78:
                scene = self._scene()
                question, answer = random_pairs(scene, self._rng, 1)[0]
                self._conversation(row, segment, [question, scene], answer + EOS_TOKEN)
            elif draw < 0.86:
                scenes = [self._scene(), self._scene()]
                answer = f"First: {scenes[0].caption} Second: {scenes[1].caption}{EOS_TOKEN}"
                pieces: list[str | Scene] = [self._rng.choice(PAIR_QUESTIONS), *scenes]
                self._conversation(row, segment, pieces if draw < 0.82 else [*scenes, pieces[0]], answer)
            else:
                prompt, answer = self._rng.choice(self._small_talk)
                self._conversation(row, segment, [prompt], answer, opening=f"{BOS_TOKEN}user\n")
        return row

    def _scene(self) -> Scene:
        return random_scene(self._rng, digits=0.2)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def _opening(self) -> str:
        system = self._rng.choice(SYSTEM_PROMPTS)
        start = f"{BOS_TOKEN}system\n{system}{EOS_TOKEN}\n" if system else ""
        return f"{start}{BOS_TOKEN}user\n"

    def _picture(self, scene: Scene) -> list[int]:
        return [self._encode(word)[0] for word in summary_words(scene, self._rng)]

    def _picture_first(self) -> Row:
        row, scene = Row.empty(), self._scene()
        shared = row.add(self._encode(self._opening()), 0, start=0)
        shared = row.add(self._picture(scene), 0, start=shared, is_picture=True)
        num_pairs = QUESTIONS_PER_PICTURE
        gap = self._rng.choice(("", "", "\n"))
        for segment, (question, answer) in enumerate(random_pairs(scene, self._rng, num_pairs), 1):
            row.parent_of[segment] = 0
            text = f"{gap}{question}{EOS_TOKEN}\n{BOS_TOKEN}assistant\n"
            end = row.add(self._encode(text), segment, start=shared)
            row.add(self._encode(answer + EOS_TOKEN), segment, start=end, learn=True)
        return row

    def _conversation(self, row: Row, segment: int, pieces: list[Any], answer: str, opening: str = "") -> None:
        end = row.add(self._encode(opening or self._opening()), segment, start=0)
        for piece in pieces:
            is_picture = isinstance(piece, Scene)
            ids = self._picture(piece) if isinstance(piece, Scene) else self._encode(piece)
            end = row.add(ids, segment, start=end, is_picture=is_picture)
        end = row.add(self._encode(f"{EOS_TOKEN}\n{BOS_TOKEN}assistant\n"), segment, start=end)
        row.add(self._encode(answer), segment, start=end, learn=True)


def main() -> None:
    """Train and save from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--cache", type=Path, default=Path("models/cache"), help="folder of models and states")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=3, help="rows per step")
    parser.add_argument("--max-learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    settings = Settings(args.seed, args.steps, args.rows, args.max_learning_rate)
    train(settings, args.cache, args.out)


def train(settings: Settings, cache: Path, out: Path) -> None:
    """Train the adapter and save it; an interrupted run goes on from its last saved state in `cache`."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)  # more as soon as cores are idle
    torch.manual_seed(settings.seed)
    folder = prepare_smollm2(cache, say)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Eager attention: the fused one is several times slower to differentiate on CPUs.
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=best_dtype(), attn_implementation="eager")
    talk = small_talk(model, tokenizer, cache / "small-talk.json")
    trained = torch.nn.ParameterList(add_adapter(model))
    time_s = _run_steps(settings, model, trained, Teacher(tokenizer, talk, settings.seed), cache / "language-state.pt")
    save_adapter(model, out)
    say(f"trained in {time_s:.0f} s")


def small_talk(model: Any, tokenizer: Any, path: Path) -> list[tuple[str, str]]:
    """Prompts without pictures and what the untrained model says to them, so that it goes on saying it."""
    import torch

    if path.exists():
        return [tuple(pair) for pair in json.loads(path.read_text())]
    pairs = []
    for prompt in PROMPTS:
        text = f"{BOS_TOKEN}user\n{prompt}{EOS_TOKEN}\n{BOS_TOKEN}assistant\n"
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            output = model.generate(ids, max_new_tokens=SMALL_TALK_TOKENS, do_sample=False)
        # An answer that was cut short has no end to learn.
        pairs.append((prompt, tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)))
    path.write_text(json.dumps(pairs))
    return pairs


def _run_steps(settings: Settings, model: Any, trained: Any, teacher: Teacher, state_path: Path) -> float:
    """Optimise; returns the seconds spent. The state is saved every SAVE_EVERY_STEPS."""
    import torch

    optimizer = torch.optim.AdamW(trained, lr=settings.max_learning_rate, weight_decay=0.0, betas=(0.9, 0.98))
    rate = partial(rate_at, num_steps=settings.num_steps, warmup_steps=20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(settings.seed)
    run = Run(trained, [optimizer], [schedule], generator)
    first, spent_s = resume(state_path, settings, run)
    for _ in range(first * settings.rows_per_step):
        teacher.row()
    started_s = time.monotonic() - spent_s
    for step in range(first + 1, settings.num_steps + 1):
        rows = [teacher.row() for _ in range(settings.rows_per_step)]
        loss = answer_loss(model, rows, generator)
        trained.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        spent_s = time.monotonic() - started_s
        if step % 5 == 0:
            say(f"step {step}/{settings.num_steps} loss {loss.item():.4f} {spent_s:.0f} s")
        if step % SAVE_EVERY_STEPS == 0:
            save_state(state_path, settings, (step, spent_s), run)
            use_idle_cores()
    return spent_s


def answer_loss(model: Any, rows: list[Row], generator: Any) -> Any:
    """Cross-entropy of the answers in rows that are padded on the right, where attention never looks."""
    import torch
    import torch.nn.functional as F

    length = max(len(row.ids) for row in rows)
    ids, labels, positions = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(3))
    labels[:] = IGNORED
    noisy = torch.zeros(len(rows), length, 1)
    seen = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)
    for i, row in enumerate(rows):
        num = len(row.ids)
        ids[i, :num], labels[i, :num] = torch.tensor(row.ids), torch.tensor(row.labels)
        positions[i, :num], noisy[i, :num, 0] = torch.tensor(row.positions), torch.tensor(row.is_picture).float()
        segments = torch.tensor(row.segments)
        parents = torch.tensor([row.parent_of.get(segment, segment) for segment in row.segments])
        visible = (segments[:, None] == segments) | (parents[:, None] == segments)
        seen[i, :num, :num] = visible.tril()
    table = model.get_input_embeddings().weight
    embeddings = table[ids].float()
    noise = torch.randn(embeddings.shape, generator=generator) * table.float().std() * NOISE
    embeddings = (embeddings + noisy * noise).to(table.dtype)
    mask = torch.zeros(seen.shape, dtype=table.dtype).masked_fill(~seen, torch.finfo(table.dtype).min)[:, None]
    output = model.model(inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False)
    wanted = labels[:, 1:]
    chosen = wanted != IGNORED
    logits = model.lm_head(output.last_hidden_state[:, :-1][chosen])
    return F.cross_entropy(logits.float(), wanted[chosen])


if __name__ == "__main__":
    main()
