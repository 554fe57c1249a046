"""The environment a decode process must be started with: vLLM reads it at import, and hands it to its children."""

from __future__ import annotations

from pathlib import Path

GUARD_DIR = Path(__file__).parent / "guard"


def decode_environment(model_path: str, threads: int, kv_cache_gib: int) -> dict[str, str]:
    """Variables to add for a decode worker on a CPU. On a GPU only the quiet ones matter; the rest do no harm.

    Args:
        model_path: folder or Hugging Face id of the weights.
        threads: compute threads of the engine; more than there are idle cores is far slower than one.
        kv_cache_gib: KV cache on a CPU, whole GiB, at least 1.
    Returns:
        Values by name. `PYTHONPATH` is the guard's folder alone: whoever has one puts it behind (`os.pathsep`).
    """
    environment = {
        "PYTHONPATH": str(GUARD_DIR),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_cache_gib)),
        "OMP_NUM_THREADS": str(max(1, threads)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # On a CPU the "uni" executor is refused otherwise: it saves one process and its imports. AsyncLLM keeps its
        # engine core in a process of its own either way.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Even with enforce_eager vLLM compiles a helper on the first request for logprobs: 16 s in which nothing moves.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment
