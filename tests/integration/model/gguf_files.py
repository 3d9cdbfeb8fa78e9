"""GGUF files of small models: a transformers model written as llama.cpp's converter writes it, and odd ones by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

VOCABULARY = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), "Ġ", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]

_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip


def write_tokenizer(
    writer: gguf.GGUFWriter, *, words: str = "gpt-2", tokens: Sequence[str] = VOCABULARY, merges: Sequence[str] = MERGES
) -> None:
    """A byte-level vocabulary; its first three tokens are unknown, begin and end."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(
    path: Path,
    architecture: str,
    numbers: Mapping[str, int | float],
    tensors: Mapping[str, np.ndarray],
    *,
    words: str = "gpt-2",
    tokens: Sequence[str] = VOCABULARY,
) -> Path:
    """A file with `numbers` as metadata under the architecture's name."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    write_tokenizer(writer, words=words, tokens=tokens)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_small_llama(
    path: Path, *, architecture: str = "llama", words: str = "gpt-2", drop: str = "", **extra: Any
) -> Path:
    """A Llama of one layer with random weights; `drop` names a key or a tensor to leave out, `extra` tensors to add."""
    generator = np.random.default_rng(3)
    numbers = {
        "block_count": 1, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    shapes = {
        "token_embd.weight": (len(VOCABULARY), 16),
        "output_norm.weight": (16,),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16),
        "blk.0.ffn_down.weight": (16, 24),
        **extra,
    }
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors.pop(drop, None)
    kept = {key: value for key, value in numbers.items() if key != drop}
    return write_gguf(path, architecture, kept, tensors, words=words)


def convert(model: PreTrainedModel, path: Path) -> Path:
    """What llama.cpp's converter makes of a model of transformers, its peculiarities included."""
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float()
        if architecture == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            values = _pairs_side_by_side(values, config.num_attention_heads)
        if architecture == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            values = _pairs_side_by_side(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values.numpy()
    tokens = [*VOCABULARY, *(f"token {n}" for n in range(config.vocab_size - len(VOCABULARY)))]
    return write_gguf(path, architecture, _numbers(config), tensors, tokens=tokens)


def _pairs_side_by_side(values: torch.Tensor, heads: int) -> torch.Tensor:
    pairs = len(values) // heads // 2
    return values.reshape(heads, 2, pairs, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _numbers(config: Any) -> dict[str, int | float]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.model_type in ("gemma2", "gemma3_text"):
        numbers["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma2":
        numbers["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        numbers["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return numbers
