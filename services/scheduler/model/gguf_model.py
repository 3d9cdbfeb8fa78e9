"""A GGUF file read as a model: its configuration and its tensors in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.gguf_file import FloatArray, GgufFile, GgufTensor
from services.scheduler.model.rope import frequencies, llama3_divisors

_ROPE_DIVISORS = "rope_freqs.weight"  # a table of its own, told in the configuration instead
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How one `general.architecture` maps to Hugging Face's.

    `pairs_side_by_side`: queries' and keys' rows are in the order of the original Llama code, a rotary pair side by
    side, where Hugging Face keeps them half a head apart. `norm_shift` was added to the norms' weights. `extra` gives
    what config.json says beyond the keys that all families share.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    pairs_side_by_side: bool = False
    norm_shift: float = 0.0
    extra: Callable[[_Reading], dict[str, Any]]


class GgufModel:
    """One GGUF file of a native family; anything else raises UnsupportedModelError at once."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.get("general.architecture")
        if name not in _FAMILIES:
            raise UnsupportedModelError(
                f"{file.path.name}: general.architecture is {name!r}; supported: {', '.join(_FAMILIES)}"
            )
        self._family = _FAMILIES[name]
        self._reading = _Reading(file, name)

    def config(self) -> dict[str, Any]:
        """What Hugging Face's `config.json` of this model says, but for the dtype."""
        family, reading = self._family, self._reading
        return {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **reading.sizes(),
            "rms_norm_eps": _shortest(reading.require("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(reading.get("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "blk.0.attn_q.bias" in self.file.tensors,
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "bos_token_id": self.file.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.file.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.file.get("tokenizer.ggml.padding_token_id"),
            **family.extra(reading),
        }

    def arrays(self) -> dict[str, Callable[[], FloatArray]]:
        """By Hugging Face's name, what dequantises the tensor to fp32."""
        return {
            self._hugging_face_name(name): self._loader(tensor)
            for name, tensor in self.file.tensors.items()
            if name != _ROPE_DIVISORS
        }

    def _loader(self, tensor: GgufTensor) -> Callable[[], FloatArray]:
        heads = {"attn_q": self._reading.heads, "attn_k": self._reading.kv_heads}
        part = tensor.name.split(".")[-2]
        if self._family.pairs_side_by_side and part in heads:
            return lambda: _half_rotated(tensor.dequantised(), heads[part])
        if self._family.norm_shift and part.endswith("norm"):
            return lambda: tensor.dequantised() - self._family.norm_shift
        return tensor.dequantised

    def _hugging_face_name(self, name: str) -> str:
        if name in _MODEL_NAMES:
            return _MODEL_NAMES[name]
        block, layer, part, suffix = [*name.split("."), "", "", ""][:4]
        if block != "blk" or part not in self._family.names or suffix not in ("weight", "bias"):
            raise UnsupportedModelError(f"tensor {name!r} doesn't belong to a {self._family.architecture}")
        return f"model.layers.{layer}.{self._family.names[part]}.{suffix}"

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_DIVISORS in self.file.tensors:
            return self._llama3_scaling()
        kind = self._reading.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        factor = _shortest(self._reading.require("rope.scaling.factor"))
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = int(self._reading.require("rope.scaling.original_context_length"))
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise UnsupportedModelError(
            f"{self._reading.name('rope.scaling.type')} is {kind!r}; 'none', 'linear' and 'yarn' are supported"
        )

    def _llama3_scaling(self) -> dict[str, Any]:
        """Finds the parameters behind a table of divisors: the format keeps the table alone."""
        table = self.file.tensors[_ROPE_DIVISORS].dequantised()
        scaling = {
            "rope_type": "llama3",
            "factor": float(table.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        plain = frequencies(float(self._reading.get("rope.freq_base", 10000.0)), self._reading.head_dim)
        if not np.allclose(llama3_divisors(plain, scaling), table, rtol=1e-3):
            raise UnsupportedModelError(f"{_ROPE_DIVISORS} holds divisors other than those of Llama 3.1 to 3.3")
        return scaling


class _Reading:
    """The metadata of one architecture, whose keys begin with its name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture
        self.heads = int(self.require("attention.head_count"))
        self.kv_heads = int(self.get("attention.head_count_kv", self.heads))
        self.hidden_size = int(self.require("embedding_length"))
        self.layers = int(self.require("block_count"))
        self.head_dim = int(self.get("attention.key_length", self.hidden_size // self.heads))

    def name(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.get(self.name(key), default)

    def require(self, key: str) -> Any:
        return self._file.require(self.name(key))

    def has_tensor(self, name: str) -> bool:
        return name in self._file.tensors

    def sizes(self) -> dict[str, int]:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise UnsupportedModelError(f"{self._file.path.name} has no tensor 'token_embd.weight'")
        for key, default in (("rope.dimension_count", self.head_dim), ("attention.value_length", self.head_dim)):
            if (value := int(self.get(key, default))) != self.head_dim:
                raise UnsupportedModelError(
                    f"{self.name(key)} is {value}; only the head's size, {self.head_dim}, is supported"
                )
        return {
            "vocab_size": embedding.shape[0],
            "hidden_size": self.hidden_size,
            "intermediate_size": int(self.require("feed_forward_length")),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": int(self.require("context_length")),
        }


def _llama_extra(reading: _Reading) -> dict[str, Any]:
    return {"hidden_act": "silu", "mlp_bias": reading.has_tensor("blk.0.ffn_gate.bias")}


def _qwen_extra(reading: _Reading) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _gemma_extra(reading: _Reading) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2_extra(reading: _Reading) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(reading.require("attention.sliding_window")),
        "query_pre_attn_scalar": _attention_scalar(reading, layers_of_27b=46),
        "attn_logit_softcapping": _shortest(reading.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": _shortest(reading.get("final_logit_softcapping", 30.0)),
    }


def _gemma3_extra(reading: _Reading) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(reading.require("attention.sliding_window")),
        "query_pre_attn_scalar": _attention_scalar(reading, layers_of_27b=62),
        "rope_local_base_freq": _shortest(reading.get("rope.freq_base_swa", 10000.0)),
    }


def _attention_scalar(reading: _Reading, layers_of_27b: int) -> int:
    """The format doesn't say it: a generation's largest model takes hidden size per head, the others the head's."""
    return reading.hidden_size // reading.heads if reading.layers == layers_of_27b else reading.head_dim


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        architecture="LlamaForCausalLM", model_type="llama", pairs_side_by_side=True, extra=_llama_extra
    ),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", model_type="qwen2", extra=_qwen_extra),
    "qwen3": _Family(architecture="Qwen3ForCausalLM", model_type="qwen3", extra=_qwen_extra),
    "gemma": _Family(architecture="GemmaForCausalLM", model_type="gemma", norm_shift=1.0, extra=_gemma_extra),
    "gemma2": _Family(
        architecture="Gemma2ForCausalLM", model_type="gemma2", names=_SANDWICH_NAMES, norm_shift=1.0,
        extra=_gemma2_extra,
    ),
    "gemma3": _Family(
        architecture="Gemma3ForCausalLM", model_type="gemma3_text", names=_SANDWICH_NAMES, norm_shift=1.0,
        extra=_gemma3_extra,
    ),
}  # fmt: skip


def _half_rotated(weight: FloatArray, heads: int) -> FloatArray:
    """Undoes the order of rotary pairs: from side by side to half a head apart."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    """The shortest decimal of a float32 (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))
