"""A vLLM plugin (`vllm.general_plugins`): requests without an adapter stay without one on a CPU.

WHY   In a batch that mixes requests with and without an adapter, vLLM marks those without by the index -1. Its kernels
      for GPUs skip that index; the torch versions that a CPU uses take the last adapter in memory for it, so that the
      base model's answers change with whoever shares the batch (vLLM 0.32: `vllm/lora/ops/torch_ops/lora_ops.py`).
HOW   What the first half of an adapter made of such rows is set to zero: the second half then adds nothing to them.
GONE  when vLLM's torch operators skip -1 themselves: `test_decode_adapters.py` then passes without this file.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Called by vLLM once in each of its processes."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrink_of_own(
        inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[lora_indices_tensor < 0] = 0

    # The one is used by the operator for prompts, the other by the wrapper for single tokens.
    lora_ops.bgmv_shrink = shrink_of_own
    punica_cpu.bgmv_shrink = shrink_of_own
