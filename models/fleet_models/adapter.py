"""The language model's low-rank adapter: how it is trained, kept and merged."""

from pathlib import Path
from typing import Any

RANK = 8
ADAPTER_NAME = "language.safetensors"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapter(model: Any) -> list[Any]:
    """Freeze a language model and add a pair of small matrices to each linear layer; returns what trains (float32)."""
    import torch
    import torch.nn.functional as F

    class Adapted(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        """A frozen linear layer plus a product of two small ones."""

        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            self.down = torch.nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
            self.up = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

        def forward(self, values: Any) -> Any:
            added = F.linear(F.linear(values, self.down.to(values.dtype)), self.up.to(values.dtype))
            return self.base(values) + added

    model.requires_grad_(requires_grad=False)
    trained = []
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in LINEARS:
                if hasattr(block, name):
                    adapted = Adapted(getattr(block, name))
                    setattr(block, name, adapted)
                    trained += [adapted.down, adapted.up]
    return trained


def adapter_weights(model: Any) -> dict[str, Any]:
    """The adapter as float16 tensors: NAME.down [rank, inputs] and NAME.up [outputs, rank]."""
    import torch

    return {
        name: value.detach().to(torch.float16).contiguous()
        for name, value in model.named_parameters()
        if name.endswith((".down", ".up"))
    }


def save_adapter(model: Any, out: Path) -> None:
    """Write the adapter as ADAPTER_NAME in a folder."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file(adapter_weights(model), out / ADAPTER_NAME, metadata={"format": "pt"})
    (out / ADAPTER_NAME).chmod(0o644)


def merge_adapter(weights: dict[str, Any], adapter: dict[str, Any]) -> None:
    """Add the adapter to a checkpoint's tensors in place; their names and types stay."""
    for name, up in adapter.items():
        layer, _, part = name.rpartition(".")
        if part == "up":
            base = weights[f"{layer}.weight"]
            change = up.float() @ adapter[f"{layer}.down"].float()
            weights[f"{layer}.weight"] = (base.float() + change).to(base.dtype)
