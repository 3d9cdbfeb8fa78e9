"""A GGUF file read as a Llama: its configuration in Hugging Face's words, and its tensors dequantised one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize

from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.rope import llama3_divisors

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
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"  # a table of its own, told in the configuration instead


class GgufFile:
    """One GGUF file of architecture `llama`; anything else raises UnsupportedModelError at once."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise UnsupportedModelError(f"{path} can't be read as GGUF: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise UnsupportedModelError(f"{path.name}: general.architecture is {architecture!r}; supported: 'llama'")

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value under `key` as a Python value, or `default`."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The metadata value under `key`; a file without it raises UnsupportedModelError."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"the GGUF file has no {key}")
        return value

    @property
    def tensors(self) -> list[ReaderTensor]:
        """Every tensor in the file, still packed."""
        return self._reader.tensors

    def config(self) -> dict[str, Any]:
        """What Hugging Face's `config.json` of this model says, but for the dtype."""
        heads = int(self.require("llama.attention.head_count"))
        hidden = int(self.require("llama.embedding_length"))
        head_dim = int(self.get("llama.attention.key_length", hidden // heads))
        if int(self.get("llama.rope.dimension_count", head_dim)) != head_dim:
            raise UnsupportedModelError("llama.rope.dimension_count isn't the head size; partial RoPE isn't supported")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": int(self.require("llama.feed_forward_length")),
            "num_hidden_layers": int(self.require("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.get("llama.attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": int(self.require("llama.context_length")),
            "rms_norm_eps": _shortest(self.require("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.get("llama.rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face's name, fp32 tensor), one dequantised at a time."""
        heads = int(self.require("llama.attention.head_count"))
        kv_heads = int(self.get("llama.attention.head_count_kv", heads))
        for name, tensor in self._tensors.items():
            if name == _ROPE_DIVISORS:
                continue
            values = _dequantised(tensor)
            if ".attn_q." in name:
                values = _half_rotated(values, heads)
            elif ".attn_k." in name:
                values = _half_rotated(values, kv_heads)
            yield _hugging_face_name(name), values

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if _ROPE_DIVISORS in self._tensors:
            return self._llama3_scaling(head_dim)
        kind = self.get("llama.rope.scaling.type", "none")
        if kind == "none":
            return None
        factor = _shortest(self.require("llama.rope.scaling.factor"))
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        raise UnsupportedModelError(f"llama.rope.scaling.type is {kind!r}; 'none' and 'linear' are supported")

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Finds the parameters behind a table of divisors: the format keeps the table alone."""
        table = _dequantised(self._tensors[_ROPE_DIVISORS])
        scaling = {
            "rope_type": "llama3",
            "factor": float(table.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = float(self.get("llama.rope.freq_base", 10000.0))
        if not torch.allclose(llama3_divisors(theta, head_dim, scaling), table, rtol=1e-3):
            raise UnsupportedModelError(f"{_ROPE_DIVISORS} holds divisors other than those of Llama 3.1 to 3.3")
        return scaling


def _dequantised(tensor: ReaderTensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).copy())


def _half_rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes GGUF's order of rotary pairs: it keeps the two of a pair side by side, Hugging Face half a head apart."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _hugging_face_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    block, layer, part, suffix = [*name.split("."), "", "", ""][:4]
    if block != "blk" or part not in _LAYER_NAMES or suffix not in ("weight", "bias"):
        raise UnsupportedModelError(f"tensor {name!r} doesn't belong to a Llama")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _shortest(value: float) -> float:
    """The shortest decimal of a float32 (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))
