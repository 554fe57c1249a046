"""A second real model, with a LoRA adapter, on a fleet of real models: served live, asked, taken off."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from fleet_cli.testing import RunningFleet, wait_for
from fleet_cli.up.rundir import RunDir
from fleet_models import smollm2

pytestmark = [pytest.mark.e2e, pytest.mark.models]

FIRST, SECOND = "omnifleet-vlm", smollm2.NAME
QUESTION = "What is the capital of France?"
#: SmolLM2-135M: width, layers, and what the projections give.
HIDDEN, LAYERS, SIZES = 576, 30, {"q_proj": 576, "v_proj": 192}


def ask(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


def make_adapter(folder: Path, rank: int = 4) -> Path:
    """A random LoRA adapter."""
    folder.mkdir()
    random = np.random.default_rng(3)
    weights = {}
    for layer in range(LAYERS):
        for name, size in SIZES.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = (random.standard_normal((rank, HIDDEN)) * 0.05).astype(np.float32)
            weights[f"{key}.lora_B.weight"] = (random.standard_normal((size, rank)) * 0.05).astype(np.float32)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "target_modules": list(SIZES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def footprint(fleet: RunningFleet) -> dict[str, set[str]]:
    status = fleet.status()
    return {
        "workers": {worker["worker_id"] for worker in status["workers"]},
        "queues": {pool["pool"] for pool in status["pools"]},
        "routes": {route["model"] for route in status["table"]["routes"]},
        "processes": set(fleet.stack()["processes"]),
        "segments": {path.name for path in Path("/dev/shm").glob(f"{RunDir(fleet.run_dir).namespace}*")},
    }


def test_a_second_model_and_its_adapter_come_answer_and_leave_nothing(
    real_fleet: RunningFleet, client: openai.OpenAI, tmp_path: Path
) -> None:
    before = footprint(real_fleet)
    first_before = ask(client, FIRST)

    served = real_fleet.command("serve", SECOND, "--lora", timeout_s=600)
    assert served.returncode == 0, served.stderr
    plain = ask(client, SECOND)
    added = real_fleet.command("serve", "--on", SECOND, "--adapter", f"odd={make_adapter(tmp_path / 'odd')}")
    assert added.returncode == 0, added.stderr
    adapted = ask(client, "odd")
    again = ask(client, SECOND)
    parents = {entry.id: entry.model_dump()["parent"] for entry in client.models.list()}
    unserved = real_fleet.command("unserve", SECOND)

    assert "Paris" in plain
    assert adapted != plain
    assert again == plain
    assert parents["odd"] == SECOND
    assert unserved.returncode == 0, unserved.stderr
    with pytest.raises(openai.NotFoundError):
        ask(client, SECOND)
    assert ask(client, FIRST) == first_before

    def is_gone() -> bool:
        return all(names <= before[kind] for kind, names in footprint(real_fleet).items())

    wait_for(is_gone, 30.0, "nothing of the second model is left")


def test_a_model_vllm_does_not_know_is_reported_while_others_answer(
    real_fleet: RunningFleet, client: openai.OpenAI, tmp_path: Path
) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "nonsense", "architectures": ["NoSuchModel"]}))

    served = real_fleet.command("serve", str(folder), timeout_s=600)
    with pytest.raises(openai.InternalServerError) as refused:
        ask(client, "strange")
    answer = ask(client, FIRST)
    entry = next(entry for entry in client.models.list() if entry.id == "strange").model_dump()
    real_fleet.command("unserve", "strange")

    assert served.returncode == 1
    assert "does not start" in served.stderr
    assert refused.value.code == "model_failed"
    assert str(tmp_path) not in str(refused.value.body)
    assert (entry["state"], str(tmp_path) in entry["error"]) == ("failed", False)
    assert answer
